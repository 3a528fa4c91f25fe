"""LoRA and DoRA without peft: merged equals unmerged for every kind of layer, gradients are those of the formula, one
graph computes what eager does over stored FP8 weights, peft reads the exported adapters over transformers' model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models import GPTModel
from te_models.checkpoints import CheckpointError
from te_models.lora import add_lora, export_adapter, load_adapter, lora_state_dict, merge_lora, save_adapter
from te_models.lora.adapter import adapters_of
from tests.compare import refused
from tests.training.runs import tiny_model

# peft asks transformers for an attribute by its earlier name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SPLITS = torch.tensor([3, 0, 5])
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 4},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "phi3": {**SIZES, "pad_token_id": 0},
    "glm4_moe": {**SIZES, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
SLOW_FAMILIES = [name for name in FAMILIES if name not in ("llama", "qwen3_moe")]
LAYERS: dict[str, Any] = {
    "linear": lambda: te.Linear(16, 24),
    "norm and linear": lambda: te.LayerNormLinear(16, 24, bias=False),
    "mlp": lambda: te.LayerNormMLP(16, 32, activation="swiglu"),
    "experts": lambda: te.GroupedLinear(3, 16, 24),
    "experts apart": lambda: te.GroupedLinear(3, 16, 24, single_grouped_weight=False),
}


def adapted(layer: nn.Module, use_dora: bool, targets: tuple[str, ...] = ("all-linear",)) -> nn.Module:
    """The layer under a parent, with adapters far from zero."""
    parent = nn.ModuleDict({"layer": layer})
    add_lora(parent, 4, alpha=8, use_dora=use_dora, targets=targets)
    moved(parent)
    return parent


@torch.no_grad()
def moved(model: nn.Module) -> None:
    for tensor in lora_state_dict(model).values():
        tensor.add_(torch.randn_like(tensor) * 0.2)


def call(parent: nn.Module, x: Tensor) -> Tensor:
    layer = parent["layer"]
    grouped = isinstance(getattr(layer, "base_layer", layer), te.GroupedLinear)
    return layer(x, SPLITS) if grouped else layer(x)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_merged_equals_unmerged(kind: str, use_dora: bool) -> None:
    """In float32 to 1e-5 of the largest result, and a new adapter changes no bit."""
    layer = LAYERS[kind]()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "bias" in name and "norm" not in name:
                p.normal_()
        x = torch.randn(10, 16)  # two rows past the last expert
        before = call(nn.ModuleDict({"layer": layer}), x)
        parent = nn.ModuleDict({"layer": layer})
        add_lora(parent, 4, use_dora=use_dora)
        assert torch.equal(call(parent, x), before)
        moved(parent)
        unmerged = call(parent, x)
        merge_lora(parent)
        assert parent["layer"] is layer
        merged = call(parent, x)
    assert (unmerged - before).abs().max() > 0.1
    assert (unmerged - merged).abs().max() < 1e-5 * before.abs().max()
    assert all(p.requires_grad for p in parent.parameters())


def test_gradients_of_dora_are_those_of_the_formula() -> None:
    parent = adapted(te.Linear(16, 24, params_dtype=torch.float64), use_dora=True)
    adapter: Any = parent["layer"]
    x = torch.randn(5, 16, dtype=torch.float64)
    dy = torch.randn(5, 24, dtype=torch.float64)
    call(parent, x).backward(dy)
    own = {name: p.grad for name, p in adapter.named_parameters() if p.requires_grad}
    assert set(own) == {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}
    adapter.zero_grad()
    total = adapter.base_layer.weight + adapter.lora_B.weight @ adapter.lora_A.weight * 2
    total = total * (adapter.lora_magnitude_vector / total.norm(dim=1).detach())[:, None]
    (x @ total.T + adapter.base_layer.bias).backward(dy)
    for name, p in adapter.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(own[name], p.grad)
    assert adapter.base_layer.weight.grad is None


def test_targets_are_globs() -> None:
    model = GPTModel(tiny_model(moe=True))
    add_lora(model, 2, targets=("decoder.layers.0.*linear_qkv", "experts.linear_fc2"))
    names = {name.rpartition(".lora_")[0] for name in lora_state_dict(model)}
    assert names == {f"decoder.layers.{layer}.mlp.experts.linear_fc2" for layer in (0, 1)} | {
        "decoder.layers.0.self_attention.linear_qkv"
    }
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(lora_state_dict(model))


def test_a_part_of_a_joined_weight_is_adapted(tmp_path: Path) -> None:
    """transformers' names, and those of the blocks: other rows keep every bit, and what is merged and exported."""
    qkv, fc1 = (f"decoder.layers.0.{n}.linear_{m}" for n, m in (("self_attention", "qkv"), ("mlp", "fc1")))
    for targets in (("q_proj", "v_proj", "up_proj"), ("linear_qkv.q", "linear_qkv.v", "linear_fc1.up")):
        model = GPTModel(tiny_model(layers=1))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        add_lora(model, 4, targets=targets)
        tokens = torch.randint(257, (2, 16))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for _ in range(3):
            model(tokens, labels=tokens, return_logits=False).loss.backward()
            optimizer.step()
        assert {name.rpartition(".lora_")[0] for name in lora_state_dict(model)} == {qkv, fc1}
        logits = model(tokens).logits
        save_adapter(model, tmp_path / "own")
        merge_lora(model)
        torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        changed = {
            f"{name}.{block}": not torch.equal(new, old)
            for name, sizes in ((qkv, {"q": 64, "k": 32, "v": 32}), (fc1, {"gate": 128, "up": 128}))
            for block, new, old in zip(
                sizes,
                model.get_parameter(f"{name}.weight").split([*sizes.values()]),
                before[f"{name}.weight"].split([*sizes.values()]),
                strict=True,
            )
        }
        assert {name for name, its in changed.items() if its} == {f"{qkv}.q", f"{qkv}.v", f"{fc1}.up"}
        again = GPTModel(tiny_model(layers=1))
        again.load_state_dict(before)
        load_adapter(again, tmp_path / "own")
        assert torch.equal(again(tokens).logits, logits)
    whole, all_of_it = (GPTModel(tiny_model(layers=1)) for _ in range(2))
    add_lora(whole, 4, targets=("linear_qkv",))
    add_lora(all_of_it, 4, targets=("q_proj", "k_proj", "v_proj"))
    assert all(adapter.rows is None for _, adapter in adapters_of(all_of_it))
    assert [*lora_state_dict(whole)] == [*lora_state_dict(all_of_it)]
    with pytest.raises(
        ValueError, match=r"the targets mean q of .*linear_qkv alone, and DoRA trains the length of each"
    ):
        add_lora(GPTModel(tiny_model()), 4, targets=("q_proj",), use_dora=True)


def ours_and_theirs(family: str) -> tuple[GPTModel, Any]:
    transformers = pytest.importorskip("transformers")
    values = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_config(values).eval()
    return GPTModel.from_hf(theirs).eval(), theirs


@torch.no_grad()
def assert_peft_computes(model: GPTModel, theirs: Any, adapter: Path) -> dict[str, Any]:
    """Assert that peft, with the adapter over transformers' model, computes what ours does; return its settings."""
    ids = torch.arange(12)[None] * 5 % 96
    before, ours = theirs(ids).logits, model(ids).logits
    found = pytest.importorskip("peft").PeftModel.from_pretrained(theirs, adapter)(ids).logits
    assert (ours - before).abs().max() > 1e-2 * before.abs().max()
    assert (ours - found).abs().max() < 1e-5 * before.abs().max()
    return json.loads((adapter / "adapter_config.json").read_text())


def test_peft_reads_the_parts_of_joined_weights_that_are_adapted(tmp_path: Path) -> None:
    """As modules of transformers' model, with the rank of the adapter, and no module for the other rows."""
    model, theirs = ours_and_theirs("llama")
    add_lora(model, 4, alpha=8, targets=("q_proj", "v_proj", "gate_proj"))
    for _, adapter in adapters_of(model):
        with torch.no_grad():
            adapter.lora_B.weight.copy_(torch.randn_like(adapter.lora_B.weight) * adapter.rows)
    export_adapter(model, tmp_path / "adapter")
    config = assert_peft_computes(model, theirs, tmp_path / "adapter")
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {"q_proj", "v_proj", "gate_proj"}
    assert config["r"] == 4 and "rank_pattern" not in config


def check_one_graph(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], backend: str) -> None:
    """DoRA over stored FP8 weights, under the recipe: loss and gradients of the graph are eager's, up to rounding."""
    recipe = te.Float8CurrentScaling()
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe):
        model = make()
    add_lora(model, 4, use_dora=True)
    moved(model)
    assert any(isinstance(p, te.QuantizedTensor) for p in model.parameters())

    def run(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        with te.autocast(recipe=recipe):
            loss = loss_of(model)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (eager, expected), (found, gradients) = run(model), run(torch.compile(model, fullgraph=True, backend=backend))
    torch.testing.assert_close(found, eager, rtol=1e-3, atol=0)
    assert len(gradients) == len(lora_state_dict(model))
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_one_graph_of_layers_over_stored_fp8_weights() -> None:
    x = torch.randn(8, 32)
    check_one_graph(
        lambda: nn.Sequential(te.LayerNormLinear(32, 48), te.Linear(48, 32)), lambda m: m(x).square().sum(), "eager"
    )


@pytest.mark.slow
@pytest.mark.parametrize("moe", [False, True])
def test_one_graph_of_a_model_over_stored_fp8_weights(moe: bool) -> None:
    ids = torch.arange(16)[None] * 7 % 257
    check_one_graph(
        lambda: GPTModel(tiny_model(moe=moe, hidden=32, layers=1)),
        lambda model: model(ids, labels=ids, return_logits=False).loss,
        "inductor",
    )


def test_folders_come_back_bit_for_bit(tmp_path: Path) -> None:
    model, other = GPTModel(tiny_model(moe=True)), GPTModel(tiny_model(moe=True))
    other.load_state_dict(model.state_dict())
    add_lora(model, 2, use_dora=True, targets=("linear_fc*",))
    moved(model)
    save_adapter(model, tmp_path / "adapter")
    load_adapter(other, tmp_path / "adapter")
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, other(ids).logits)
    with pytest.raises(CheckpointError, match="does not hold adapters of this model"):
        load_adapter(GPTModel(tiny_model(moe=True, hidden=32)), tmp_path / "adapter")


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_peft_reads_the_export_over_transformers_model(family: str, use_dora: bool, tmp_path: Path) -> None:
    model, theirs = ours_and_theirs(family)
    add_lora(model, 4, alpha=8, use_dora=use_dora)
    moved(model)
    if family == "glm4_moe" or (use_dora and "experts" in str(theirs)):
        says = "for which peft has no DoRA" if use_dora else "which peft reads as a part of the experts"
        with pytest.raises(ValueError, match=says):
            export_adapter(model, tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()
        return
    export_adapter(model, tmp_path / "adapter", base_model="org/name")
    config = assert_peft_computes(model, theirs, tmp_path / "adapter")
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == "org/name"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank is 0; allowed: a positive integer"),
        ({"rank": 2, "alpha": 0}, "alpha is 0; allowed"),
        ({"rank": 2, "dropout": 1}, "dropout is 1; allowed"),
        ({"rank": 2, "targets": ["router"]}, "'router' is not found among the GEMM layers; allowed: 'all-linear'"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], says: str) -> None:
    model = GPTModel(tiny_model())
    refused(lambda: add_lora(model, **options), says)
    assert all(p.requires_grad for p in model.parameters())
    refused(lambda: save_adapter(model, "anywhere"), "the model has no adapters")
    add_lora(model, 2)
    refused(lambda: add_lora(model, 2), "the model has adapters already")
