"""GPTModel by itself: every variant runs and learns, names match the files', creation, refusals, small semantics."""

import copy
import math
from pathlib import Path

import pytest
import torch

import te_models
import te_models.layers as te
from te_models import ConfigError, DecoderLayer, GPTModel, MLAConfig, MLPConfig, ModelConfig
from te_models.checkpoints import expected_tensors
from te_models.model.mixers.attention import SelfAttention
from tests.build import VARIANTS, heads, tiny, tiny_moe, token_ids
from tests.compare import refused


def build(config, seed: int = 0, **options) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(config, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stochastic_rounding_follows_the_seed_that_the_model_was_built_after(device: str) -> None:
    """On the meta device, too, where a model to be loaded is built and nothing is drawn."""

    def streams(seed: int) -> list[list[int]]:
        model = build(tiny(), seed, device=device)
        return [m.fp8_rng_state.tolist() for m in model.modules() if isinstance(m, te.QuantizedModule)]

    first = streams(3)
    assert len({seed for seed, _ in first}) == len(first) > 4 and streams(3) == first
    assert not {seed for seed, _ in streams(4)} & {seed for seed, _ in first}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient_and_the_loss_falls(name: str) -> None:
    model = build(VARIANTS[name])
    ids = token_ids(2, 17)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        output = model(ids, labels=ids)
        losses.append(output.loss.item())
        optimizer.zero_grad()
        output.loss.backward()
        for key, parameter in model.named_parameters():
            if not parameter.requires_grad:  # of an indexer without a loss
                assert "index" in key
                continue
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.abs().max() > 0, key
        optimizer.step()
    assert output.logits.shape == (2, 17, model.config.vocab_size) and losses[2] < losses[0]


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_position_sees_only_its_past(name: str) -> None:
    model = build(VARIANTS[name]).eval()
    ids = token_ids(2, 12)
    other = ids.clone()
    other[:, 8:] = (other[:, 8:] + 1) % model.config.vocab_size
    before, after = model(ids).logits, model(other).logits
    # Not bitwise in an MoE: the rows that share an expert's GEMM change, and with them its blocking.
    assert (before[:, :8] - after[:, :8]).abs().max() <= (1e-5 if model.config.moe else 0) * before.abs().max()
    assert (before[:, 8] - after[:, 8]).abs().max() > 1e-2


@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_those_of_the_files(name: str, layout: str) -> None:
    model = GPTModel(VARIANTS[name], device="meta", expert_layout=layout)
    got = {key: tuple(tensor.shape) for key, tensor in model.stored_tensors()}
    assert got == dict(expected_tensors(VARIANTS[name], layout))


@pytest.mark.parametrize("name", ["dense", "moe_shared", "layernorm", "moe_sigmoid_groups"])
def test_meta_then_materialised_equals_built_directly(name: str) -> None:
    direct = build(VARIANTS[name], seed=3)
    model = GPTModel(VARIANTS[name], device="meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    for (key, a), (_, b) in zip(direct.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
    ids = token_ids(2, 9)
    assert torch.equal(direct(ids).logits, model(ids).logits)


def test_both_layouts_start_from_the_same_numbers() -> None:
    grouped, per_gemm = (build(VARIANTS["moe"], expert_layout=layout) for layout in ("grouped", "per-gemm"))
    ids = token_ids(2, 9)
    assert torch.equal(grouped(ids).logits, per_gemm(ids).logits)
    assert not torch.equal(grouped(ids).logits, build(VARIANTS["moe"], seed=1)(ids).logits)


def test_initial_values() -> None:
    model = build(tiny(hidden_size=128, num_layers=8, init_method_std=0.02))
    layer = model.decoder.layers[0]
    assert layer.self_attention.linear_qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for narrow in (layer.self_attention.linear_proj.weight, layer.mlp.linear_fc2.weight):
        assert narrow.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert (layer.self_attention.linear_qkv.layer_norm_weight == 1).all()
    assert (build(VARIANTS["zero_centered"]).decoder.final_layernorm.weight == 0).all()


def test_the_loss_is_that_of_the_shifted_labels() -> None:
    model = build(tiny())
    ids = token_ids(2, 9)
    labels = ids.clone()
    labels[0, 3] = -100
    output = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(ids, labels=labels, return_logits=False).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(ids).loss is None
    last = model(ids, last_logits_only=True)
    assert torch.allclose(last.logits[:, 0], output.logits[:, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_conversion_keeps_frequencies_and_loss_weights_exact(name: str) -> None:
    model = build(VARIANTS[name])
    exact = {key: buffer.clone() for key, buffer in model.named_buffers()}
    assert exact
    model.to(torch.bfloat16)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, exact[key]), key
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(token_ids(1, 5)).logits.dtype == torch.bfloat16


def test_expert_bias_is_never_rounded() -> None:
    model = build(VARIANTS["moe_sigmoid_groups"])
    bias = model.decoder.layers[0].mlp.router.expert_bias
    bias.copy_(torch.tensor([1.0001, 0.0, -1.0001, 0.3]))
    exact = bias.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.decoder.layers[0].mlp.router.expert_bias, exact)


@pytest.mark.parametrize("name", ["dense", "moe", "mixed_layers"])
def test_activation_checkpointing_gives_the_same_gradients(name: str) -> None:
    ids = token_ids(2, 9)
    results = []
    for enabled in (False, True):
        model = build(VARIANTS[name], activation_checkpointing=enabled)
        assert model.activation_checkpointing is enabled
        loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_activation_checkpointing_keeps_fewer_tensors() -> None:
    def saved(enabled: bool) -> int:
        model = build(tiny(num_layers=6), activation_checkpointing=enabled)
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() if not isinstance(tensor, torch.nn.Parameter) else 0
            return tensor

        ids = token_ids(2, 32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, labels=ids, return_logits=False)
        return total

    assert saved(True) < saved(False) / 4


def test_mixed_precision_under_torch_autocast() -> None:
    model = build(tiny_moe(aux_loss_coeff=0.01))
    ids = token_ids(2, 17)
    exact = model(ids, labels=ids)
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(ids, labels=ids)
        loss_only = model(ids, labels=ids, return_logits=False)
    assert mixed.logits.dtype == torch.bfloat16 and mixed.loss.dtype == torch.float32
    # The mean over 32 tokens of errors of at most a few roundings of logits of size 4.
    assert mixed.loss.item() == pytest.approx(exact.loss.item(), abs=4 * 2**-8)
    assert loss_only.loss.item() == pytest.approx(mixed.loss.item(), abs=1e-5)
    loss_only.loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_dropout_acts_in_training_only() -> None:
    config = tiny(hidden_dropout=0.5, attention=heads(None, attention_dropout=0.5))
    model = build(config)
    ids = token_ids(1, 9)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_copy_is_independent() -> None:
    model = build(VARIANTS["moe"])
    twin = copy.deepcopy(model)
    ids = token_ids(1, 9)
    assert torch.equal(model(ids).logits, twin(ids).logits)
    with torch.no_grad():
        twin.decoder.layers[0].mlp.experts.linear_fc1.weight.zero_()
    assert not torch.equal(model(ids).logits, twin(ids).logits)


def test_a_layer_stands_alone() -> None:
    layer = DecoderLayer(tiny())
    x = torch.randn(2, 5, 32)
    y, routed = layer(x)
    assert y.shape == x.shape and routed is None


@pytest.mark.parametrize("recipe", [te.Float8CurrentScaling(), te.MXFP8BlockScaling()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("name", ["dense", "moe_shared"])
def test_fp8_recipes_run_the_whole_model(name: str, recipe) -> None:
    """Within a few percent of bf16's loss, with different bits, and with gradients everywhere."""
    config = VARIANTS[name].replace(hidden_size=64, init_method_std=0.1)
    ids = token_ids(2, 16)
    model = build(config, params_dtype=torch.bfloat16)
    exact = model(ids, labels=ids)
    with te.autocast(recipe=recipe):
        output = model(ids, labels=ids)
    assert not torch.equal(output.logits, exact.logits)
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=0.05)
    output.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
    with te.quantized_model_init(recipe=recipe):
        stored = build(config, params_dtype=torch.bfloat16)
    quantized = [key for key, p in stored.named_parameters() if isinstance(p, te.QuantizedTensor)]
    assert quantized
    assert not any("router" in key or "embedding" in key or "output_layer" in key for key in quantized)
    with te.autocast(recipe=recipe):
        assert torch.equal(stored(ids).logits, output.logits)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (tiny(attention=heads(None, chunk_size=4, mla=MLAConfig()), layer_types=("full", "chunked")), "layer_types"),
        (tiny(mlp=MLPConfig(ffn_hidden_size=4, alpha=1.7)), "mlp.alpha is 1.7"),
        (tiny(mlp=MLPConfig(ffn_hidden_size=4, up_offset=1.0)), "mlp.up_offset is 1.0"),
        (tiny(mlp=MLPConfig(ffn_hidden_size=4, gated=False, clamp=1.0)), "mlp.clamp is 1.0"),
    ],
)
def test_what_is_not_implemented_is_refused(config, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*does not implement"):
        GPTModel(config)
    refused(lambda: DecoderLayer(config), field, error=ConfigError)


def test_wrong_calls_are_refused() -> None:
    model = build(tiny())
    with pytest.raises(ConfigError, match="expert_layout is 'stacked'; allowed: 'grouped', 'per-gemm'"):
        GPTModel(tiny(), expert_layout="stacked")
    refused(lambda: model(torch.zeros(3, dtype=torch.int64)), "input_ids has shape (3,)")
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 4\); allowed: \[1, 3\]"):
        model(torch.zeros(1, 3, dtype=torch.int64), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 3\); allowed: \[2, 3\]"):
        model(torch.zeros(2, 3, dtype=torch.int64), attention_mask=torch.ones(1, 3))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    refused(lambda: model(ids, labels=ids[:1]), "labels has shape (1, 3); allowed: (2, 3), as input_ids")
    for wrong in (torch.zeros(2, 1), torch.zeros(3, 3), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"position_ids has shape .*; allowed: \[2, 3\] or \[1, 3\]"):
            model(ids, position_ids=wrong.long())
    with pytest.raises(ValueError, match="a loss needs the logits of all tokens"):
        model(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), last_logits_only=True)
    refused(lambda: model.set_aux_loss_coeff(0.1), "no router losses")


def test_public_names_are_lazy_and_complete() -> None:
    for name in te_models.__all__:
        assert getattr(te_models, name).__name__ == name and name in dir(te_models)
    refused(lambda: te_models.GTPModel, "no attribute 'GTPModel'", error=AttributeError)


def test_rounding_of_the_embedding_multiplier() -> None:
    """Gemma's multiplier is sqrt(hidden size) rounded to the weight's dtype."""
    model = build(VARIANTS["softcaps"], params_dtype=torch.bfloat16)
    got = model.embedding(token_ids(1, 3), torch.arange(3)[None])
    factor = torch.tensor(math.sqrt(32)).bfloat16()
    assert torch.equal(got, model.embedding.word_embeddings.weight[token_ids(1, 3)] * factor)


@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("recipe", [te.Float8CurrentScaling(), te.MXFP8BlockScaling()], ids=lambda r: type(r).__name__)
@torch.no_grad()
def test_quantized_weights_load_save_and_load_again(tmp_path: Path, recipe, layout: str) -> None:
    """Quantizing while loading equals quantizing a built model, and quantized files restore every bit."""
    config = VARIANTS["moe_shared"].replace(hidden_size=64)
    exact = build(config, params_dtype=torch.bfloat16)
    exact.save_pretrained(tmp_path / "exact")
    with te.quantized_model_init(recipe=recipe):
        expected = build(config, params_dtype=torch.bfloat16)
    options = {"dtype": torch.bfloat16, "recipe": recipe, "expert_layout": layout}
    loaded = GPTModel.from_pretrained(tmp_path / "exact", **options)
    loaded.save_pretrained(tmp_path / "quantized")
    again = GPTModel.from_pretrained(tmp_path / "quantized", **options)
    for (key, a), (_, b) in zip(loaded.named_parameters(), again.named_parameters(), strict=True):
        assert type(a) is type(b)
        if isinstance(a, te.QuantizedTensor):
            assert torch.equal(a.dequantize(), b.dequantize()), key
    ids = token_ids(2, 9)
    logits = [model(ids).logits for model in (expected, loaded, again)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], exact(ids).logits)


@pytest.mark.parametrize("config", [tiny(), tiny_moe()], ids=["dense", "moe"])
@pytest.mark.parametrize("recipe", [None, te.MXFP8BlockScaling()], ids=["plain", "mxfp8"])
def test_a_model_without_data_computes_shapes(config: ModelConfig, recipe: te.Recipe | None) -> None:
    """As for counting operations before anything is loaded."""
    model, ids = GPTModel(config, device="meta"), torch.zeros(2, 32, dtype=torch.int64, device="meta")
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits.is_meta and output.logits.shape == (2, 32, config.vocab_size)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_dtype_and_params_dtype_are_one_argument() -> None:
    """from_pretrained and the command line say dtype, the layers params_dtype."""
    for dtypes in ({"dtype": torch.bfloat16}, {"params_dtype": torch.bfloat16}):
        parameters = list(GPTModel(tiny(), device="meta", **dtypes).parameters())
        assert {p.dtype for p in parameters} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"dtype is torch.float32 and params_dtype is torch.bfloat16; allowed: one"):
        GPTModel(tiny(), device="meta", dtype=torch.float32, params_dtype=torch.bfloat16)


def test_chunks_are_attended_to_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of a mask of all tokens; a text that is no longer than a chunk has none."""
    config = VARIANTS["chunked_l2_temperature"]
    torch.manual_seed(0)
    model, ids = GPTModel(config), token_ids(2, 20)
    found = model(ids).logits
    monkeypatch.setattr(SelfAttention, "packs", lambda *_: False)
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("te_models.model.mixers.attention.other_chunks", None)  # not called
    torch.testing.assert_close(model(ids[:, :3]).logits, found[:, :3], rtol=1e-4, atol=1e-5)
