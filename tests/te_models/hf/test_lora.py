"""LoRA through peft on each of our layers and on models: values, gradients, merging, quantized weights, refusals."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="peft needs it")
peft = pytest.importorskip("peft", reason="makes the adapters")

import te_models.layers as te  # noqa: E402
from te_models.hf import TEModelForCausalLM  # noqa: E402
from te_models.hf.lora import LoraAdapter, LoraGroupedLinear  # noqa: E402
from tests.checkpoints.family_cases import CASES as FAMILY_CASES  # noqa: E402
from tests.checkpoints.family_cases import make  # noqa: E402
from tests.te_models.hf_models import hf_model, token_ids  # noqa: E402

RECIPES = [
    te.MXFP8BlockScaling(),
    te.Float8CurrentScaling(),
    te.Float8BlockScaling(),
    te.NVFP4BlockScaling(),
    te.DelayedScaling(),
]
# peft asks transformers' own models by a name that is on its way out there
OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SPLITS = torch.tensor([3, 0, 4])
LAYERS: dict[str, Any] = {
    "Linear": lambda **new: te.Linear(32, 48, **new),
    "Linear, bias returned": lambda **new: te.Linear(32, 48, return_bias=True, **new),
    "LayerNormLinear": lambda **new: te.LayerNormLinear(32, 48, **new),
    "LayerNormLinear, norm returned": lambda **new: te.LayerNormLinear(
        32, 48, normalization="RMSNorm", return_layernorm_output=True, **new
    ),
    "LayerNormMLP": lambda **new: te.LayerNormMLP(32, 64, **new),
    "LayerNormMLP, gated": lambda **new: te.LayerNormMLP(
        32, 64, activation="swiglu", return_bias=True, return_layernorm_output=True, **new
    ),
    "GroupedLinear": lambda **new: te.GroupedLinear(3, 32, 48, **new),
    "GroupedLinear, per GEMM": lambda **new: te.GroupedLinear(3, 32, 48, single_grouped_weight=False, **new),
}


class Holder(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **options: Any) -> Any:
        result = self.layer(*args, **options)
        return result[0] if isinstance(result, tuple) else result


def lora(**options: Any) -> Any:
    """A configuration whose adapters change the result from the start."""
    return peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "init_lora_weights": False, **options})


def adapted(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """Return (the peft model of one layer, the layer, arguments of a call)."""
    torch.manual_seed(0)
    layer = LAYERS[kind](params_dtype=dtype)
    model = peft.get_peft_model(Holder(layer), lora(**{"target_modules": ["layer"], "use_rslora": True, **options}))
    x = torch.randn(7, 32, dtype=dtype)
    return model, layer, (x, SPLITS) if "Grouped" in kind else (x,)


def products(adapter: Any) -> dict[str, Tensor]:
    """alpha / sqrt(r) B A of each adapted weight, in float64, from the definition."""
    found = {}
    pairs = [("lora_A", "lora_B"), ("lora_fc2_A", "lora_fc2_B")]
    names = adapter.base_layer.weight_names()
    for (a, b), name in zip(pairs, names, strict=False):
        a, b = (getattr(adapter, factor)["default"].weight.detach().double() for factor in (a, b))
        product = 8 / a.shape[-2] ** 0.5 * b @ a
        if product.dim() == 3 and len(names) > 1:
            return dict(zip(names, product, strict=True))
        found[name] = product
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_a_layer_computes_with_the_weight_plus_the_product(kind: str, dtype: torch.dtype) -> None:
    model, layer, x = adapted(kind, dtype)
    got, products_of = model(*x), products(model.base_model.model.layer)
    before = {name: getattr(layer, name).clone() for name in products_of}
    model.merge_adapter(safe_merge=True)
    for name, product in products_of.items():
        expected = (before[name].double() + product).to(dtype)
        # one rounding to the dtype, of a sum in float32
        torch.testing.assert_close(getattr(layer, name), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    scale = got.abs().max().item()
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype] * scale
    torch.testing.assert_close(model(*x), got, rtol=0, atol=tolerance)
    model.unmerge_adapter()
    for name, weight in before.items():
        largest = (weight.double() + products_of[name]).abs().max().item()
        torch.testing.assert_close(getattr(layer, name), weight, rtol=0, atol=2 * largest * torch.finfo(dtype).eps)
    with model.disable_adapter():
        off = model(*x)
    torch.testing.assert_close(off, Holder(layer)(*x), rtol=0, atol=0)
    assert not torch.allclose(off, got, rtol=0, atol=0.1 * scale)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.NAME)
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if "," not in kind or "GEMM" in kind])
def test_over_quantized_weights(kind: str, recipe: Any) -> None:
    with te.quantized_model_init(recipe=recipe):
        model, layer, x = adapted(kind)
    stored = {name: getattr(layer, name) for name in layer.weight_names()}
    assert all(isinstance(weight, te.QuantizedTensor) for weight in stored.values())
    got = model(*x)
    with te.autocast(recipe=recipe):
        model(*x).square().mean().backward()
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.grad is not None} <= {
        "lora_A", "lora_B", "lora_fc2_A", "lora_fc2_B"
    }  # fmt: skip
    assert all((p.grad is not None) == ("lora_" in n) for n, p in model.named_parameters())
    model.merge_adapter()
    assert not any(isinstance(getattr(layer, name), te.QuantizedTensor) for name in stored)
    torch.testing.assert_close(model(*x), got, rtol=0, atol=2e-6 * got.abs().max().item())
    model.unmerge_adapter()
    assert all(getattr(layer, name) is weight for name, weight in stored.items())
    assert torch.equal(model(*x), got)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.NAME)
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_the_product_with_the_weight_is_that_of_the_recipe(kind: str, recipe: Any) -> None:
    """An adapter of zeros changes no bit."""
    model, layer, x = adapted(kind, torch.bfloat16, init_lora_weights=True)
    with te.autocast(recipe=recipe):
        assert torch.equal(model(*x), Holder(layer)(*x))
    with te.autocast(recipe=recipe), model.disable_adapter():
        assert torch.equal(model(*x), Holder(layer)(*x))


def test_dropout_is_of_what_the_adapter_sees() -> None:
    model, layer, (x,) = adapted("LayerNormLinear", lora_dropout=0.5)
    adapter = model.base_model.model.layer
    torch.manual_seed(1)
    got = model.train()(x)
    torch.manual_seed(1)
    dropped = F.dropout(layer.normed(x), 0.5)
    a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
    torch.testing.assert_close(got, layer(x) + F.linear(F.linear(dropped, a), b) * adapter.scaling["default"])
    assert torch.equal(model.eval()(x), model(x))


@torch.no_grad()
def test_a_weight_kept_for_micro_batches_is_not_used_after_a_merge() -> None:
    model, _, (x,) = adapted("LayerNormLinear")
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        model(x, is_first_microbatch=True)
        kept = model(x, is_first_microbatch=False)
        model.merge_adapter()
        merged = model(x, is_first_microbatch=False)  # quantizes and caches the merged weight
        assert not torch.equal(merged, kept) and torch.equal(model(x, is_first_microbatch=True), merged)
        with te.microbatch(first=False):
            model(x)


@torch.no_grad()
def test_a_broken_adapter_is_not_merged() -> None:
    model, layer, _ = adapted("LayerNormMLP")
    before = layer.fc1_weight.clone()
    model.base_model.model.layer.lora_fc2_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="fc2_weight with the adapter 'default' has values that are not finite"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.fc1_weight, before)


def test_transformer_engines_layer() -> None:
    model = peft.get_peft_model(te.TransformerLayer(32, 64, 4).eval(), lora())
    x = torch.randn(5, 2, 32)
    got = model(x)
    assert len([m for m in model.modules() if isinstance(m, LoraAdapter)]) == 3
    model.merge_adapter()
    torch.testing.assert_close(model(x), got, rtol=0, atol=2e-6 * got.abs().max().item())


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: case -> the folder of its model, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(case: str) -> Path:
        if not (root / case).exists():
            with warnings.catch_warnings(action="ignore"):
                (make(case) if case in FAMILY_CASES else hf_model(case)).save_pretrained(root / case)
        return root / case

    return folder


@pytest.fixture
def load(folders: Any) -> Any:
    """Return a function: case -> our model of it."""
    return lambda case="llama", **options: TEModelForCausalLM.from_pretrained(folders(case), **options)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * expected.abs().max().item())


IDS = token_ids(2, 9) % 61
FAMILIES = ("llama", "qwen3", "qwen3_moe-mixed", "deepseek_v3", "gpt_oss", "gemma3", "gpt2", "llama4")


@pytest.mark.sentinels("gemma3", "gpt_oss", "deepseek_v3")
@pytest.mark.parametrize("case", FAMILIES)
def test_every_linear_layer_of_a_family(load: Any, case: str) -> None:
    model = load(case)
    base = model(IDS).logits
    layers = sum(isinstance(m, te.Linear | te.LayerNormLinear | te.GroupedLinear) for m in model.modules())
    adapters = peft.get_peft_model(model, lora())
    assert sum(isinstance(m, LoraAdapter) for m in model.modules()) == layers
    output = adapters(input_ids=IDS, labels=IDS)
    assert not torch.allclose(output.logits, base, rtol=0, atol=0.05 * base.abs().max().item())
    output.loss.backward()
    assert all((p.grad is not None) == ("lora_" in n) for n, p in adapters.named_parameters())
    with adapters.disable_adapter():
        assert torch.equal(adapters(IDS).logits, base)
    generated = adapters.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
    merged = adapters.merge_and_unload()
    assert merged is model and not any(isinstance(m, LoraAdapter) for m in model.modules())
    close(merged(IDS).logits, output.logits)
    assert torch.equal(merged.generate(input_ids=IDS, max_new_tokens=4, do_sample=False), generated)


@OLD_NAME
@torch.no_grad()
def test_logits_are_those_of_pefts_adapters_on_transformers_model(load: Any, folders: Any) -> None:
    """With one A for q, k and v, and for gate and up, whose rows are those of one weight here."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders("qwen3"))
    theirs = peft.get_peft_model(theirs, lora())
    ours = peft.get_peft_model(load("qwen3"), lora())
    parts = {
        "self_attention.linear_qkv": [f"self_attn.{p}_proj" for p in "qkv"],
        "self_attention.linear_proj": ["self_attn.o_proj"],
        "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.linear_fc2": ["mlp.down_proj"],
    }
    for own, their in zip(ours.base_model.model.decoder.layers, theirs.base_model.model.model.layers, strict=True):
        for name, others in parts.items():
            adapter, others = own.get_submodule(name), [their.get_submodule(other) for other in others]
            for other in others:
                other.lora_A["default"].weight.copy_(adapter.lora_A["default"].weight)
            adapter.lora_B["default"].weight.copy_(torch.cat([other.lora_B["default"].weight for other in others]))
    close(ours(IDS).logits, theirs(IDS).logits, 1e-4)
    close(ours.merge_and_unload()(IDS).logits, theirs.merge_and_unload()(IDS).logits, 1e-4)


@pytest.mark.parametrize("recipe", [te.MXFP8BlockScaling(), te.NVFP4BlockScaling()], ids=lambda recipe: recipe.NAME)
def test_a_model_that_is_stored_quantized(load: Any, recipe: Any, tmp_path: Path) -> None:
    model = load("qwen3_moe-mixed", recipe=recipe)
    base = model(IDS).logits
    adapters = peft.get_peft_model(model, lora())
    model.recipe = recipe
    before = {n: p for n, p in adapters.named_parameters() if isinstance(p, te.QuantizedTensor)}
    bits = {n: {f: t.clone() for f, t in p.fields.items()} for n, p in before.items()}
    optimizer = torch.optim.AdamW([p for p in adapters.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapters(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(before) == 12 and all(p.grad is None and not p.requires_grad for p in before.values())
    assert all(torch.equal(before[n].fields[f], t) for n, fields in bits.items() for f, t in fields.items())
    model.recipe = None
    got = adapters(IDS).logits
    adapters.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load("qwen3_moe-mixed", recipe=recipe), tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, got)
    with adapters.disable_adapter():
        assert torch.equal(adapters(IDS).logits, base)
    merged = adapters.merge_and_unload()
    close(merged(IDS).logits, got)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(TEModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits, merged(IDS).logits)


@torch.no_grad()
def test_several_adapters(load: Any) -> None:
    model = peft.get_peft_model(load(), lora())
    base, one = model.base_model, model(IDS).logits
    model.add_adapter("b", lora(r=2, target_modules=["linear_fc2", "linear_qkv"], lora_dropout=0.5))
    model.eval()
    assert torch.equal(model(IDS).logits, one)
    model.set_adapter("b")
    other = model(IDS).logits
    base.set_adapter(["default", "b"])
    both = model(IDS).logits
    assert not torch.allclose(both, one) and not torch.allclose(both, other)
    base.merge_adapter(["default", "b"])
    close(model(IDS).logits, both)
    model.unmerge_adapter()
    close(model(IDS).logits, both)
    base.add_weighted_adapter(["default", "b"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    close(model(IDS).logits, both)
    model.set_adapter("default")
    for name in ("sum", "b"):
        model.delete_adapter(name)
    close(model(IDS).logits, one)


def factors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what adapters train, by the name that it has in the model that they are over."""
    return {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if ".lora_" in n}


@pytest.mark.sentinels("qwen3_moe-mixed")
@pytest.mark.parametrize("case", ["llama", "qwen3_moe-mixed"])
@torch.no_grad()
def test_adapters_in_files(load: Any, case: str, folders: Any, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    model = peft.get_peft_model(load(case), lora(task_type="CAUSAL_LM"))
    got = model(IDS).logits
    model.save_pretrained(adapter)
    loaded = load(case)
    loaded.load_adapter(str(adapter))
    for again in (
        peft.PeftModel.from_pretrained(load(case), adapter),
        peft.PeftModel.from_pretrained(load(case), adapter, low_cpu_mem_usage=True),
        TEModelForCausalLM.from_pretrained(adapter),
        loaded,
    ):
        found = factors_of(again)
        assert found.keys() == factors_of(model).keys()
        assert all(torch.equal(found[name], factor) for name, factor in factors_of(model).items())
        close(again(IDS).logits, got)  # a product's last bit depends on where in memory its operands lie
    loaded.save_pretrained(tmp_path / "again")  # the adapter alone, as in transformers
    assert not (tmp_path / "again/model.safetensors").exists()
    modes = {file.stat().st_mode for file in (tmp_path / "again").glob("adapter_*")}
    assert len(modes) == 1, "the weights have the mode of the configuration beside them"
    assert torch.equal(peft.PeftModel.from_pretrained(load(case), tmp_path / "again")(IDS).logits, got)
    ours = tmp_path / "ours"
    load(case).save_pretrained(ours)
    peft.get_peft_model(TEModelForCausalLM.from_pretrained(ours), lora()).save_pretrained(tmp_path / "of ours")
    for name in (ours, tmp_path / "of ours"):
        assert type(transformers.AutoModelForCausalLM.from_pretrained(name)) is TEModelForCausalLM
    auto = peft.AutoPeftModelForCausalLM.from_pretrained
    model = peft.get_peft_model(TEModelForCausalLM.from_pretrained(ours), lora(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "auto")
    assert torch.equal(auto(tmp_path / "auto")(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.base_model.model.save_pretrained(tmp_path / "wrong")
    with pytest.raises(ValueError, match="adapter_kwargs has 'subfolder'"):
        TEModelForCausalLM.from_pretrained(ours, adapter_kwargs={"subfolder": "x"})


def test_parts_that_are_trained_whole(load: Any, tmp_path: Path) -> None:
    case, parts = "qwen3_moe-mixed", ["output_layer", "router", "word_embeddings"]
    model = peft.get_peft_model(load(case), lora(modules_to_save=parts))
    model(input_ids=IDS, labels=IDS).loss.backward()
    whole = [p for n, p in model.named_parameters() if p.grad is not None and "lora_" not in n]
    assert len(whole) == 4  # two of the layers are mixtures
    with torch.no_grad():
        for parameter in whole:
            parameter.add_(0.05)
    got = model(IDS).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(load(case), tmp_path)(IDS).logits, got)
    close(model.merge_and_unload()(IDS).logits, got)


@torch.no_grad()
def test_parameters_are_those_of_the_layers(load: Any, tmp_path: Path) -> None:
    """`target_parameters`: the weights of our layers get the adapters that `target_modules` gives, others peft's."""
    names = ["experts.linear_fc1.weight", "linear_proj.weight", "output_layer.weight"]
    config = lora(target_modules=None, target_parameters=names)
    model = peft.get_peft_model(load("qwen3_moe-mixed"), config)
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert kinds == {"LoraGroupedLinear", "LoraLinear", "ParamWrapper"}
    assert config.target_parameters == ["output_layer.weight"] and len(config.target_modules) == 5
    got = model(IDS).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(load("qwen3_moe-mixed"), tmp_path)(IDS).logits, got)
    model.add_adapter("b", lora(target_modules=None, target_parameters=["output_layer.weight", *names[:2]]))
    close(model.merge_and_unload()(IDS).logits, got)
    for wrong, says in (
        ("linear_qkv.layer_norm_weight", "'linear_qkv' in target_modules"),
        ("router.weight", "modules_to_save"),
    ):
        with pytest.raises(ValueError, match=says):
            peft.get_peft_model(load("qwen3_moe-mixed"), lora(target_modules=None, target_parameters=[wrong]))
    with pytest.raises(ValueError, match="also the weight of the output layer"):
        embedding = ["word_embeddings.weight"]
        peft.get_peft_model(load("llama-tied-head_dim"), lora(target_modules=None, target_parameters=embedding))


def test_names_ranks_and_layers_that_are_chosen(load: Any) -> None:
    config = lora(
        target_modules=r".*\.linear_(qkv|fc1)", target_parameters=["linear_proj.weight"], rank_pattern={"linear_qkv": 2}
    )
    model = peft.get_peft_model(load("qwen3_moe-mixed"), config)
    shapes = {n.partition("layers.")[2]: tuple(p.shape) for n, p in model.named_parameters() if "lora_A" in n}
    assert shapes["0.self_attention.linear_qkv.lora_A.default.weight"] == (2, 32)
    assert shapes["0.mlp.experts.linear_fc1.lora_A.default.weight"] == (8, 4, 32) and len(shapes) == 9
    model = peft.get_peft_model(load(), lora(target_modules=["linear_qkv"], layers_to_transform=[1]))
    assert sum(isinstance(m, LoraAdapter) for m in model.modules()) == 1


def test_biases_that_are_trained(load: Any) -> None:
    for which, count in (("all", 3 * (2 + 2 + 0)), ("lora_only", 3 * 4)):
        model = peft.get_peft_model(load("llama-biases"), lora(bias=which))
        trained = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
        assert len(trained) == count and all(n.endswith("bias") for n in trained)
    with pytest.raises(ValueError, match="bias is 'lora_only'"):
        adapted("LayerNormMLP", bias="lora_only")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights is 'orthogonal'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"layer_replication": [(0, 2)]}, "layer_replication is"),
        ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens is"),
        ({"trainable_token_indices": [3]}, "modules_to_save=\\['word_embeddings'\\]"),
        ({"r": 0}, "r is 0|should be a positive"),
    ],
)
def test_what_is_not_plain_lora_is_refused(load: Any, options: dict[str, Any], says: str) -> None:
    model = load()
    with pytest.raises(ValueError, match=says):
        peft.get_peft_model(model, lora(**options))


def test_other_ways_of_tuning_are_refused(load: Any) -> None:
    """All that peft has, at our layers: none of them knows a norm inside of a linear layer."""
    model, tuners = load(), peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING
    more = {"ADALORA": {"total_step": 10}, "IA3": {"feedforward_modules": []}, "VBLORA": {"vector_length": 8}}
    more["TRAINABLE_TOKENS"] = {"token_indices": [1]}
    refused = set()
    for kind in tuners:
        config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
        if kind == peft.PeftType.LORA or "target_modules" not in config.__dataclass_fields__:
            continue
        for target in (["linear_qkv"], "all-linear"):
            with warnings.catch_warnings(action="ignore"):
                try:
                    asked = config(target_modules=target, **more.get(kind.value, {}))
                except ImportError:  # scikit-learn
                    continue
                with pytest.raises(ValueError, match=r"of te_models|one by one|types compatible|Unsupported model"):
                    peft.get_peft_model(model, asked)
            refused.add(kind.value)
        assert not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules())
    assert {"IA3", "LOHA", "LOKR", "OFT", "BOFT", "ADALORA", "VERA", "LN_TUNING"} <= refused
    with pytest.raises(ValueError, match="of te_models"):
        peft.get_peft_model(load(), lora(), mixed=True)
    with pytest.raises(ValueError, match="of te_models"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(load(), peft.XLoraConfig(hidden_size=32, adapters={"a": "a"}, task_type="CAUSAL_LM"))


def test_calls_that_cannot_be_honoured(load: Any) -> None:
    model = peft.get_peft_model(load("qwen3_moe-mixed"), lora()).eval()
    with pytest.raises(ValueError, match="adapter_names was given"):
        model(input_ids=IDS, adapter_names=["default", "__base__"])
    model.add_adapter("b", lora())
    with pytest.raises(ValueError, match="add_weighted_adapter knows one pair"):
        model.base_model.add_weighted_adapter(["default", "b"], [1.0, 1.0], "sum", combination_type="cat")
    scaled = peft.get_peft_model(load(), lora(use_rslora=True))
    with pytest.raises(ValueError, match="'default' has use_rslora"):
        scaled.base_model.add_weighted_adapter(["default"], [1.0], "sum")
    grouped = next(m for m in model.modules() if isinstance(m, LoraGroupedLinear))
    assert grouped.row_align(torch.device("cpu")) == 1
    split = load()
    split.decoder.layers[1].mlp.linear_fc2.tp_size = 2
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.linear_fc2 is split over 2 ranks"):
        peft.get_peft_model(split, lora())
    experts = load("qwen3_moe-mixed")
    experts.decoder.layers[0].mlp.expert_model_parallel_size = 2
    with pytest.raises(ValueError, match="distributed over 2 ranks"):
        peft.get_peft_model(experts, lora())


@OLD_NAME
def test_models_without_our_layers_pass_unchanged(folders: Any) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders("llama"))
    model = peft.get_peft_model(theirs, lora(use_dora=True))
    assert {type(m).__module__ for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)} == {
        "peft.tuners.lora.layer"
    }


def gradients(model: nn.Module, call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (logits, the gradients of all parameters that have one), and clear these."""
    output = call(input_ids=IDS, labels=IDS)
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output.logits.detach(), found


@pytest.mark.parametrize("case", ["llama", "qwen3_moe-mixed"])
def test_with_layers_recomputed(load: Any, case: str) -> None:
    model = peft.get_peft_model(load(case), lora())
    model.base_model.model.recipe = te.Float8CurrentScaling()
    _, expected = gradients(model, model)
    model.gradient_checkpointing_enable()
    assert model.base_model.model.is_activation_checkpointing
    found = gradients(model, model)[1]
    assert found.keys() == expected.keys() and all("lora_" in name for name in found)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


class Chain(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(32, 64)
        self.experts = te.GroupedLinear(3, 64, 32)
        self.mlp = te.LayerNormMLP(32, 64)
        self.last = te.Linear(32, 32)

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        return self.last(self.mlp(self.experts(self.first(x), m_splits)))


@pytest.mark.slow
def test_compiled_under_a_recipe() -> None:
    model = peft.get_peft_model(Chain(), lora())
    x, recipe = torch.randn(7, 32), te.Float8CurrentScaling()

    def step(x: Tensor) -> Tensor:
        with te.autocast(recipe=recipe):
            return model(x, SPLITS)

    expected = step(x)
    expected.square().mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    got.square().mean().backward()
    close(got, expected.detach(), 1e-6)
    for name, gradient in wanted.items():
        assert "lora_" in name
        close(model.get_parameter(name).grad, gradient, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "qwen3_moe-mixed"])
def test_compiled_models(load: Any, case: str) -> None:
    model = peft.get_peft_model(load(case), lora())
    model.base_model.model.recipe = te.Float8CurrentScaling()
    logits, expected = gradients(model, model)
    compiled, found = gradients(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    close(compiled, logits, 1e-5)
    for name, gradient in found.items():
        close(gradient, expected[name], 1e-4)


def test_under_torchs_autocast(load: Any) -> None:
    model = peft.get_peft_model(load("qwen3_moe-mixed"), lora())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def test_trainer_trains_adapters_and_resumes(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    data = [{"input_ids": ids, "labels": ids} for ids in token_ids(1, 8).expand(8, -1) % 61]

    def run(**options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = peft.get_peft_model(load(), lora(lora_dropout=0.1, init_lora_weights=True, task_type="CAUSAL_LM"))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2,
            use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train(**options)
        return model, trainer

    model, trainer = run()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and not (tmp_path / "checkpoint-2/model.safetensors").exists()
    base = dict(load().named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.removeprefix("base_model.model.").replace(".base_layer", "")])
    resumed, _ = run(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, parameter), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, other), name
