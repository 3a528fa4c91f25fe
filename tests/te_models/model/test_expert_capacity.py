"""Models whose experts have a capacity, and load-balancing losses over a sequence and over the global batch."""

import pytest
import torch
from torch import Tensor

from te_models import ConfigError, GPTModel, MoEConfig, MoELayer, RouterConfig, take_expert_load
from te_models.checkpoints import CheckpointError
from te_models.kernels.permute import within_capacity
from te_models.kernels.router import load_balancing_loss, router_probabilities, router_topk
from tests.build import tiny, tiny_moe, token_ids
from tests.compare import refused

CAPACITY = {"moe_expert_capacity_factor": 0.75}
ROUTERS = {"plain": RouterConfig(), "on_input": RouterConfig(score="sigmoid", normalize=False, apply_on_input=True)}


def layer_of(**changes: object) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(tiny_moe(**changes)).double()


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_dropped_choice_adds_nothing(router: str, policy: str) -> None:
    """Against each kept choice computed alone; nor does it move a gradient."""
    layer = layer_of(router=ROUTERS[router], bias=True, moe_token_drop_policy=policy, **CAPACITY)
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    y, routed = layer(x)
    tokens = x.flatten(0, 1)
    score = layer.moe.router.score
    weights, indices = router_topk(layer.router(tokens), 2, score=score, normalize=layer.moe.router.normalize)
    kept = within_capacity(indices, weights, 4, 7, policy)  # 18 tokens, 2 choices, 4 experts
    assert not kept.all()
    assert routed.dropped_tokens is not None and int(routed.dropped_tokens) == int((~kept).sum())
    assert int(routed.tokens_per_expert.sum()) == 36
    total = []
    for t, token in enumerate(tokens):
        parts = [torch.zeros_like(token)]
        for k in range(2):
            if kept[t, k]:
                rows = torch.nn.functional.one_hot(indices[t, k], 4)
                weight = weights[t, k].double()
                on_input = layer.moe.router.apply_on_input
                result = layer.experts((token * weight if on_input else token)[None], rows)[0]
                parts.append(result if on_input else weight * result)
        total.append(torch.stack(parts).sum(0))
    expected = torch.stack(total).view_as(y)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(y)
    parameters = [x, *layer.parameters()]
    for got, right in zip(
        torch.autograd.grad(y, parameters, seed, retain_graph=True),
        torch.autograd.grad(expected, parameters, seed),
        strict=True,
    ):
        assert torch.allclose(got, right, rtol=1e-4, atol=1e-6)


def test_room_for_all_drops_nothing() -> None:
    ids, outputs = token_ids(2, 16), []
    for factor in (None, 4.0):
        torch.manual_seed(0)
        model = GPTModel(tiny_moe(aux_loss_coeff=0.01, moe_expert_capacity_factor=factor))
        outputs.append(model(ids, labels=ids))
    expected, got = outputs
    assert torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)
    assert take_expert_load(model).metrics()["dropped_tokens"] == [0.0, 0.0]


def test_a_capacity_is_no_key_of_hugging_face() -> None:
    model = GPTModel(tiny_moe(moe_ffn_hidden_size=48, **CAPACITY))
    refused(model.to_hf, "moe_expert_capacity_factor", error=CheckpointError)
    balanced = {"aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}
    GPTModel(tiny_moe(moe_ffn_hidden_size=48, **balanced)).to_hf()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor is 0.0; allowed: a positive number or null"),
        ({"moe_pad_expert_input_to_capacity": True}, "allowed: false without moe_expert_capacity_factor"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "'aux_loss', 'seq_aux_loss', 'global_aux_loss'"),
    ],
)
def test_what_cannot_be_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8, **values)


def losses(model: GPTModel, ids: Tensor, **arguments: object) -> Tensor:
    output = model(ids, labels=ids, return_logits=False, **arguments)
    assert output.load_balancing_loss is not None
    return output.load_balancing_loss


def of_kind(kind: str) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(tiny_moe(aux_loss_coeff=0.01, moe_router_load_balancing_type=kind))


def test_a_loss_by_sequence_is_the_mean_of_theirs() -> None:
    ids, model, alone = token_ids(3, 12), of_kind("seq_aux_loss"), of_kind("aux_loss")
    expected = torch.stack([losses(alone, row[None]) for row in ids]).mean()
    assert float(losses(model, ids).detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(losses(alone, ids).detach()) != pytest.approx(float(expected.detach()), rel=1e-3)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 8:] = False
    mask[2] = False
    pair = [losses(alone, ids[:1]), losses(alone, ids[1:2, :8])]
    found = losses(model, ids, attention_mask=mask)
    assert float(found.detach()) == pytest.approx(float(torch.stack(pair).mean().detach()), rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_over_the_global_batch_compares_all_micro_batches(recompute: bool) -> None:
    """Shares of the experts from the micro-batches so far, probabilities of this one; a new step begins anew."""
    model, first, second = of_kind("global_aux_loss"), token_ids(2, 12), token_ids(2, 12, seed=1)
    model.activation_checkpointing = recompute
    found = []
    for ids in (first, second):
        model.zero_grad()
        output = model(ids, labels=ids, return_logits=False)
        output.loss.backward()
        found.append(
            (float(output.load_balancing_loss.detach()), model.decoder.layers[1].mlp.router.weight.grad.clone())
        )
    alone = of_kind("aux_loss")
    assert found[0][0] == pytest.approx(float(losses(alone, first).detach()), rel=1e-6)
    alone.zero_grad()
    captured: dict[int, list[Tensor]] = {0: [], 1: []}
    for i, layer in enumerate(alone.decoder.layers):
        layer.mlp.router.register_forward_hook(lambda _m, _a, logits, i=i: captured[i].append(logits))
    outputs = [alone(ids, labels=ids, return_logits=False) for ids in (first, second)]
    total = []
    for logits in captured.values():
        chosen = torch.cat([router_topk(t, 2)[1] for t in logits])
        shares = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
        total.append(4 * (shares * router_probabilities(logits[1]).mean(0)).sum())
    expected = torch.stack(total)
    assert found[1][0] == pytest.approx(float(expected.mean().detach()), rel=1e-6)
    aux = outputs[1].aux_loss
    (outputs[1].loss - aux + 0.01 * expected.sum()).backward()
    right = alone.decoder.layers[1].mlp.router.weight.grad
    assert torch.allclose(found[1][1], right, rtol=1e-4, atol=1e-8)
    take_expert_load(model)
    assert float(losses(model, second).detach()) == pytest.approx(
        float(outputs[1].load_balancing_loss.detach()), rel=1e-6
    )


def test_evaluation_compares_its_own_tokens() -> None:
    model, ids = of_kind("global_aux_loss"), token_ids(2, 12)
    losses(model, token_ids(2, 12, seed=1))
    model.eval()
    with torch.no_grad():
        assert float(losses(model, ids)) == pytest.approx(float(losses(of_kind("aux_loss"), ids).detach()), rel=1e-6)


def test_the_load_of_experts_in_numbers() -> None:
    model = GPTModel(tiny_moe())
    for layer, counts in zip(model.decoder.layers, [(3, 3, 3, 3), (12, 0, 0, 0)], strict=True):
        layer.mlp.router.expert_counts.copy_(torch.tensor(counts))
    found = take_expert_load(model).metrics()
    assert found["max_load"] == [1.0, 4.0] and found["dropped_tokens"] == [0.0, 0.0]
    assert found["entropy"] == pytest.approx([1.3862943611198906, 0.0])
    assert take_expert_load(model).tokens.sum() == 0
    refused(lambda: take_expert_load(GPTModel(tiny())), "model has no experts")


def test_a_loss_of_sequences_without_tokens_is_zero() -> None:
    probabilities, nobody = torch.full((2, 3, 4), 0.25), torch.zeros(2, 3, dtype=torch.bool)
    assert load_balancing_loss(probabilities, torch.zeros(2, 3, 1, dtype=torch.int64), nobody).item() == 0
