"""Inputs that come quantized into an operation: read as the recipe would have made them, or else dequantized."""

import pytest
import torch

import te_models.layers as te
from tests.layers.te.ops.steps import assert_equal

NVFP4 = te.NVFP4BlockScaling(disable_stochastic_rounding=True)
MXFP8 = te.MXFP8BlockScaling()


def run(chosen: te.Recipe, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and the weight's gradient."""
    torch.manual_seed(1)
    layer = te.ops.BasicLinear(128, 64, params_dtype=torch.bfloat16)
    with te.autocast(recipe=chosen):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [y.detach(), layer.weight.grad]


@pytest.mark.parametrize(
    "quantizer, chosen",
    [
        (te.NVFP4Quantizer(), NVFP4),  # wgrad takes the transformed copy
        (te.NVFP4Quantizer(with_2d_quantization=True), NVFP4),
        (te.NVFP4Quantizer(with_rht=True, columnwise=False), NVFP4),
        (te.NVFP4Quantizer(with_rht=True), te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)),
        (te.MXFP8Quantizer(columnwise=False), MXFP8),
        (te.MXFP8Quantizer(rowwise=False), MXFP8),
        (te.MXFP8Quantizer(two_dimensional=True), MXFP8),
        (te.Float8BlockQuantizer(block_scaling_dim=2), te.Float8BlockScaling()),
        (te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2), te.recipe("delayed")),
    ],
    ids=str,
)
def test_what_the_recipe_would_not_have_made_is_dequantized(quantizer: te.Quantizer, chosen: te.Recipe) -> None:
    given = quantizer.quantize(torch.randn(64, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)))
    assert_equal(run(chosen, given.dequantize()), run(chosen, given))


@pytest.mark.parametrize(
    "quantizer, chosen",
    [
        (te.NVFP4Quantizer(with_rht=True), NVFP4),
        (te.MXFP8Quantizer(), MXFP8),
        (te.MXFP8Quantizer(columnwise=False), te.MXFP8BlockScaling(backward_override="dequantized")),
        (te.Float8BlockQuantizer(block_scaling_dim=1), te.Float8BlockScaling()),
        (te.Float8CurrentScalingQuantizer(columnwise=False), te.Float8CurrentScaling()),  # one copy serves both
    ],
    ids=str,
)
def test_what_it_would_make_is_read(
    quantizer: te.Quantizer, chosen: te.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    expected = run(chosen, x)

    def no_values(self: te.QuantizedStorage, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise AssertionError("the input was dequantized")

    monkeypatch.setattr(te.QuantizedStorage, "dequantize", no_values)
    assert_equal(expected, run(chosen, quantizer.quantize(x)))


@pytest.mark.parametrize("quantizer", [te.MXFP8Quantizer(), te.Float8CurrentScalingQuantizer()], ids=str)
@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
def test_rows_by_group_and_stacks_are_dequantized(name: str | None, quantizer: te.Quantizer) -> None:
    """Their fields have scales by group, in rows of their own."""
    m_splits = torch.tensor([20, 0, 45])
    rows = te.GroupedRows.quantize_rows(torch.randn(65, 128), m_splits, quantizer)
    stack = quantizer.quantize_grouped(torch.randn(2, 32, 128))
    grouped, linear = te.ops.GroupedLinear(3, 128, 64, bias=False), te.ops.BasicLinear(128, 64)
    with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
        assert torch.equal(grouped(rows, m_splits), grouped(rows.dequantize(), m_splits))
        for given in (rows, stack):
            for operation in (linear, te.ops.SiLU(), te.ops.Identity()):
                assert torch.equal(operation(given), operation(given.dequantize()))


def test_inference_needs_no_copy_for_the_gradient() -> None:
    layer, x = te.ops.BasicLinear(128, 64), torch.randn(32, 128)
    with torch.no_grad(), te.autocast(recipe=MXFP8):
        assert torch.equal(layer(te.MXFP8Quantizer(columnwise=False).quantize(x)), layer(x))
