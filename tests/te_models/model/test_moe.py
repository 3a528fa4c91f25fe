"""MoELayer: against a loop over tokens and experts in float64, gradients included; router losses; extreme routings."""

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, MLPConfig, MoELayer, RouterConfig
from te_models.kernels.router import load_balancing_loss, router_probabilities, router_topk, router_z_loss
from te_models.model.build import without_draws
from tests.build import tiny, tiny_moe, token_ids
from tests.compare import refused

CONFIGS = {
    "softmax": tiny_moe(),
    "not_normalized": tiny_moe(RouterConfig(normalize=False)),
    "sigmoid_bias_groups": tiny_moe(
        RouterConfig(score="sigmoid", expert_bias=True, num_groups=2, topk_groups=1, scaling_factor=2.5)
    ),
    "after_topk_biases": tiny_moe(RouterConfig(score_after_topk=True, linear_bias=True), bias=True),
    "shared": tiny_moe(shared_expert_intermediate_size=40),
    "shared_gate": tiny_moe(shared_expert_intermediate_size=40, shared_expert_gate=True),
    "one_expert": tiny_moe(num_moe_experts=1, moe_router_topk=1),
    "all_experts": tiny_moe(moe_router_topk=4),
    "ungated": tiny_moe().replace(mlp=MLPConfig(ffn_hidden_size=8, gated=False, activation="gelu")),
}


def build(config, seed: int = 0) -> MoELayer:
    torch.manual_seed(seed)
    layer = MoELayer(config)
    with torch.no_grad():
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if "bias" in name:
                tensor.normal_(std=0.2)
    return layer


def act(config, h: Tensor) -> Tensor:
    if not config.mlp.gated:
        return torch.nn.functional.gelu(h)
    gate, up = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def token_by_token(layer: MoELayer, config, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The layer's definition, one token and expert at a time. x: [T, H]; weights: the parameters by name."""
    r, moe = config.moe.router, config.moe
    logits = x @ weights["router.weight"].t() + weights.get("router.bias", 0)
    probabilities, indices = router_topk(
        logits.float(),
        moe.moe_router_topk,
        score=r.score,
        score_after_topk=r.score_after_topk,
        expert_bias=layer.router.expert_bias,
        normalize=r.normalize,
        scaling_factor=r.scaling_factor,
        num_groups=r.num_groups,
        topk_groups=r.topk_groups,
    )
    # The choice comes from the kernel, which has its own tests; the weights again in float64, for their gradient.
    chosen = logits.gather(1, indices) if r.score_after_topk else None
    scores = chosen if chosen is not None else logits
    scores = scores.softmax(-1) if r.score == "softmax" else scores.sigmoid()
    scores = scores if chosen is not None else scores.gather(1, indices)
    scores = scores / scores.sum(-1, keepdim=True) if r.normalize else scores
    scores = scores * r.scaling_factor
    assert torch.allclose(scores.float(), probabilities, rtol=1e-5, atol=1e-6)
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for k, e in enumerate(indices[t].tolist()):
            h = weights["experts.linear_fc1.weight"][e] @ x[t]
            h = h + weights["experts.linear_fc1.bias"][e] if moe.bias else h
            y = weights["experts.linear_fc2.weight"][e] @ act(config, h)
            y = y + weights["experts.linear_fc2.bias"][e] if moe.bias else y
            total = total + scores[t, k] * y
        if moe.shared_expert_intermediate_size:
            h = weights["shared_experts.linear_fc1.weight"] @ x[t]
            y = weights["shared_experts.linear_fc2.weight"] @ act(config, h)
            if moe.shared_expert_gate:
                y = y * torch.sigmoid(weights["shared_experts.gate_weight"] @ x[t])
            total = total + y
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients(name: str) -> None:
    config = CONFIGS[name]
    layer = build(config)
    x = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y, routed = layer(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(grad)
    exact_x = x.detach().double().flatten(0, 1).requires_grad_()
    exact_weights = {key: p.detach().double().requires_grad_() for key, p in layer.named_parameters()}
    expected = token_by_token(layer, config, exact_x, exact_weights)
    expected.backward(grad.double().flatten(0, 1))

    def close(got: Tensor, want: Tensor) -> bool:
        # Sums of at most 40 products in float32, twice in a row: 2^-24 * 40, relative to the largest entry.
        return bool((got.double() - want).abs().max() <= 2 * 40 * 2.0**-24 * want.abs().max())

    assert close(y.flatten(0, 1), expected) and close(x.grad.flatten(0, 1), exact_x.grad)
    for key, parameter in layer.named_parameters():
        # With one expert its normalised weight is 1 whatever the router says: no gradient but rounding.
        if name == "one_expert" and key.startswith("router"):
            assert parameter.grad.abs().max() < 1e-6
        else:
            assert close(parameter.grad, exact_weights[key].grad), key
    assert routed.tokens_per_expert.sum() == 22 * config.moe.moe_router_topk


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens_leave_experts_empty(tokens: int) -> None:
    layer = build(CONFIGS["softmax"])
    x = torch.randn(1, tokens, 32).requires_grad_()
    y, routed = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    empty = routed.tokens_per_expert == 0
    assert empty.any() or tokens == 2
    assert (layer.experts.linear_fc1.weight.grad[empty] == 0).all()
    assert layer.experts.linear_fc1.weight.grad.isfinite().all()


def test_all_tokens_in_one_expert() -> None:
    layer = build(tiny_moe(moe_router_topk=1))
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x = torch.rand(2, 9, 32)
    y, routed = layer(x)
    assert routed.tokens_per_expert.tolist() == [0, 0, 18, 0]
    w1, w2 = layer.experts.linear_fc1.weight[2], layer.experts.linear_fc2.weight[2]
    expected = act(CONFIGS["softmax"], x @ w1.t()) @ w2.t()
    assert torch.allclose(y, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_equal_experts_equal_the_dense_mlp() -> None:
    """What dense-to-MoE upcycling relies on: with normalised weights, k copies of one MLP are that MLP."""
    layer = build(tiny_moe(moe_router_topk=3))
    with torch.no_grad():
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.weight.copy_(linear.weight[:1].expand_as(linear.weight))
    x = torch.randn(2, 9, 32)
    w1, w2 = layer.experts.linear_fc1.weight[0], layer.experts.linear_fc2.weight[0]
    expected = act(CONFIGS["softmax"], x @ w1.t()) @ w2.t()
    assert torch.allclose(layer(x)[0], expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_router_losses_enter_the_loss_with_their_weights() -> None:
    config = tiny_moe(aux_loss_coeff=0.02, z_loss_coeff=0.003)
    torch.manual_seed(0)
    model = GPTModel(config)
    logits: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda module, inputs, output: logits.append(output))
    ids = token_ids(2, 9)
    output = model(ids, labels=ids)
    balance = [load_balancing_loss(router_probabilities(t), router_topk(t, 2)[1]) for t in logits]
    z = [router_z_loss(t) for t in logits]
    assert output.load_balancing_loss.item() == pytest.approx(sum(balance).item() / 2, rel=1e-6)
    assert output.z_loss.item() == pytest.approx(sum(z).item() / 2, rel=1e-6)
    expected = 0.02 * sum(balance).item() + 0.003 * sum(z).item()
    assert output.aux_loss.item() == pytest.approx(expected, rel=1e-6)
    language = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(language.item() + expected, rel=1e-6)
    assert output.tokens_per_expert.shape == (2, 4)
    assert output.tokens_per_expert.sum(-1).tolist() == [36, 36]
    model.set_aux_loss_coeff(0.2)
    assert model(ids, labels=ids).aux_loss.item() == pytest.approx(expected + 0.18 * sum(balance).item(), rel=1e-5)


@pytest.mark.parametrize("over", ["aux_loss", "seq_aux_loss", "global_aux_loss", "joint_aux_loss"])
@pytest.mark.parametrize("hashed", [(0,), (0, 1)])
def test_layers_whose_experts_a_table_chooses_are_not_balanced(over: str, hashed: tuple[int, ...]) -> None:
    """Of one sequence in evaluation all losses are the same, but that transformers' shares add up to K = 2."""
    torch.manual_seed(0)
    model = GPTModel(tiny_moe(aux_loss_coeff=0.02, moe_router_load_balancing_type=over, hash_layers=hashed)).eval()
    logits: list[Tensor] = []
    model.decoder.layers[1].mlp.router.register_forward_hook(lambda module, inputs, output: logits.append(output))
    found = model(token_ids(1, 9)).load_balancing_loss
    expected = load_balancing_loss(router_probabilities(logits[0]), router_topk(logits[0], 2)[1])
    expected = expected * (2 if over == "joint_aux_loss" else 1) * (len(hashed) == 1)
    torch.testing.assert_close(found, expected)


def test_padding_does_not_enter_the_router_losses() -> None:
    model = GPTModel(tiny_moe(aux_loss_coeff=0.02, z_loss_coeff=0.003))
    ids = token_ids(1, 9)
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.int64), ids), dim=1)
    mask = torch.arange(14)[None] >= 5
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    alone = model(ids)
    together = model(padded, attention_mask=mask, position_ids=positions)
    assert together.load_balancing_loss.item() == pytest.approx(alone.load_balancing_loss.item(), rel=1e-5)
    assert together.z_loss.item() == pytest.approx(alone.z_loss.item(), rel=1e-5)


def test_loss_weights_survive_a_move_and_refuse_what_is_not_computed() -> None:
    model = GPTModel(tiny_moe(aux_loss_coeff=0.02))
    model.set_aux_loss_coeff(0.5)
    model.to(torch.bfloat16)
    assert model.router_loss_weights.aux_loss_coeff.item() == 0.5
    refused(lambda: model.set_z_loss_coeff(0.1), "moe.z_loss_coeff is 0 in this model's configuration")
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="allowed: 0 or more"):
            model.set_aux_loss_coeff(wrong)
    model.set_aux_loss_coeff(0)
    model.set_aux_loss_coeff(0.1)  # computed, so it can come back


def test_a_dense_configuration_is_refused() -> None:
    refused(lambda: MoELayer(tiny()), "config.moe is None")


def test_a_model_without_draws_is_zeros() -> None:
    """... its shared experts' gate, too: parameters that modules draw themselves may be filled outside `no_grad`."""
    with without_draws():
        model = GPTModel(CONFIGS["shared_gate"])
    drawn = {name for name, p in model.named_parameters() if p.any()}
    assert drawn == {name for name in drawn if "norm" in name}
    assert not model.decoder.layers[0].mlp.shared_experts.gate_weight.any()
