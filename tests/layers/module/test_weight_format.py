"""A stored weight whose blocks or scales are not those of the active recipe: read as it is, warned of, or refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models.layers.gemm import weight_format as stored_form

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: te.Linear(256, 128, bias=False),
    "op": lambda: te.ops.BasicLinear(256, 128),
    "grouped": lambda: te.GroupedLinear(2, 256, 128, bias=False),
    "per gemm": lambda: te.GroupedLinear(2, 256, 128, bias=False, single_grouped_weight=False),
}


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_form, "_warned", set())


def build(recipe: te.Recipe, kind: str = "linear") -> nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe):
        return LAYERS[kind]()


def run(layer: nn.Module, recipe: te.Recipe, function: Callable[..., Tensor] | None = None) -> Tensor:
    x = torch.linspace(-1, 1, 16 * 256).view(16, 256).requires_grad_()
    splits = (torch.tensor([7, 9]),) if isinstance(layer, te.GroupedLinear) else ()
    with te.autocast(recipe=recipe):
        y = (layer if function is None else function)(x, *splits)
    y.sum().backward()
    assert x.grad is not None
    return y.detach()


OTHER_FORMS = [
    ("block", {"use_f32_scales": True}, {}, "float8_block with force_pow_2_scales False"),
    ("block", {"w_block_scaling_dim": 1}, {}, "float8_block with block_scaling_dim 1"),
    ("mxfp8", {}, {"enable_2d_quantization": True}, "mxfp8 with two_dimensional False"),
    ("nvfp4", {}, {"disable_2d_quantization": True}, "nvfp4 with with_2d_quantization True"),
    ("current", {}, {"use_power_2_scales": True}, "float8 with force_pow_2_scales False"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name, stored, wanted, text", OTHER_FORMS)
def test_another_form_of_the_format_runs_and_warns_once(
    name: str, stored: dict[str, Any], wanted: dict[str, Any], text: str, compiled: bool
) -> None:
    layer, chosen = build(te.recipe(name, **stored)), te.recipe(name, **wanted)
    function = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else None
    with pytest.warns(UserWarning) as said:
        run(layer, chosen, function)
        run(layer, chosen, function)
    assert [str(w.message).startswith(f"a weight stored as {text} is in another form") for w in said] == [True]
    assert te.recipe_report(layer).stored == {"": str(layer.weight.quantizer)}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer_says_so(kind: str) -> None:
    layer = build(te.MXFP8BlockScaling(), kind)
    with pytest.warns(UserWarning, match="two_dimensional False") as said:
        run(layer, te.MXFP8BlockScaling(enable_2d_quantization=True))
    assert len(said) == 1


def test_an_fp8_dtype_counts() -> None:
    layer = te.Linear(256, 128, bias=False)
    quantizer = te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
    layer.weight = nn.Parameter(quantizer.quantize(layer.weight.detach()))
    with pytest.warns(UserWarning, match=r"float8 with fp8_dtype torch\.float8_e5m2 is in another form"):
        run(layer, te.Float8CurrentScaling())


@pytest.mark.parametrize(
    "stored, wanted",
    [
        (te.Float8BlockScaling(), te.Float8BlockScaling()),
        (te.Float8BlockScaling(), te.Float8BlockScaling(backward_override="dequantized")),
        (te.DelayedScaling(), te.Float8CurrentScaling()),
        (te.Float8CurrentScaling(use_power_2_scales=True), te.DelayedScaling()),
        (te.NVFP4BlockScaling(), te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)),
    ],
)
def test_the_same_form_says_nothing(stored: te.Recipe, wanted: te.Recipe) -> None:
    layer = build(stored)
    with warnings.catch_warnings(action="error"):
        run(layer, wanted)


def test_copies_are_no_form() -> None:
    layer = build(te.MXFP8BlockScaling())
    layer.weight = nn.Parameter(layer.weight.detach().update_usage(rowwise=True, columnwise=False), False)
    with warnings.catch_warnings(), te.autocast(recipe=te.MXFP8BlockScaling()):
        warnings.simplefilter("error")
        layer(torch.randn(4, 256))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_stored_2d_weight_is_not_multiplied_by_2d_blocks(kind: str) -> None:
    layer = build(te.Float8BlockScaling(), kind)
    with pytest.raises(ValueError, match="input and the stored weight both have 128x128 blocks"):
        run(layer, te.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1))
    gradients = te.Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1)
    with pytest.raises(ValueError, match="grad_output and the stored weight both have 128x128 blocks"):
        run(layer, gradients)
    with pytest.warns(UserWarning, match="block_scaling_dim 2"):  # those GEMMs do not run
        run(layer, gradients.replace(backward_override="high_precision"))
    with torch.no_grad(), te.autocast(recipe=gradients):
        layer(torch.randn(16, 256), *((torch.tensor([7, 9]),) if isinstance(layer, te.GroupedLinear) else ()))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_stored_transformed_weight_is_no_operand_of_dgrad(kind: str) -> None:
    layer = build(te.NVFP4BlockScaling(disable_2d_quantization=True), kind)
    for name in layer.weight_names():
        values = getattr(layer, name).dequantize().detach()
        quantizer = te.NVFP4Quantizer(with_rht=True)
        stored = quantizer.quantize(values) if values.dim() == 2 else quantizer.quantize_grouped(values)
        setattr(layer, name, nn.Parameter(stored))
    recipe = te.NVFP4BlockScaling(disable_2d_quantization=True)
    with pytest.raises(ValueError, match="the stored weight has the random Hadamard transform"):
        run(layer, recipe)
    run(layer, recipe.replace(backward_override="high_precision"))  # that GEMM does not run


TWO, ONE = te.Float8BlockQuantizer(block_scaling_dim=2), te.Float8BlockQuantizer(block_scaling_dim=1)
TWO_BY_ROWS = te.HybridQuantizer(rowwise_quantizer=TWO, columnwise_quantizer=ONE)
TWO_BY_COLUMNS = te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=TWO)


@pytest.mark.parametrize(
    "x, weight, dy, refused",
    [
        (TWO, TWO, ONE, "input and weight both"),
        (ONE, TWO, TWO, "grad_output and weight both"),
        (TWO, ONE, TWO, "grad_output and input both"),
        (ONE, TWO_BY_ROWS, TWO, None),
        (ONE, TWO_BY_COLUMNS, TWO_BY_ROWS, "grad_output and weight both"),
    ],
)
def test_a_custom_recipe_cannot_ask_for_2d_by_2d(
    x: te.Quantizer, weight: te.Quantizer, dy: te.Quantizer, refused: str | None
) -> None:
    quantizers = {"input": x, "weight": weight, "grad_output": dy}
    chosen = te.CustomRecipe(qfactory=lambda role: quantizers[role.tensor_type])
    layer = te.Linear(256, 128, bias=False)
    if refused is None:
        run(layer, chosen)
        return
    with pytest.raises(ValueError, match=f"{refused} have 128x128 blocks"):
        run(layer, chosen)
