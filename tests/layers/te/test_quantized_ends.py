"""`fp8_grad=True` and `fp8_output=True`: what leaves a layer in either direction is a quantized tensor."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.layers as te

RECIPES: dict[str, te.Recipe] = {
    "current": te.Float8CurrentScaling(),
    "block": te.Float8BlockScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
    "nvfp4": te.NVFP4BlockScaling(),
}
KINDS = {"linear": te.Linear, "norm": te.LayerNormLinear}


def gradient(layer: Any, recipe: te.Recipe, x: Tensor, dy: Tensor, **options: bool) -> Tensor:
    te.set_rounding_seed(layer, 3)
    part = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(part, **options)
    y.backward(dy)
    assert part.grad is not None
    return part.grad


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_input_gradient_comes_quantized(name: str, kind: str) -> None:
    layer, recipe = KINDS[kind](64, 32), RECIPES[name]
    x, dy = torch.randn(2, 16, 64), torch.randn(2, 16, 32)
    plain = gradient(layer, recipe, x, dy)
    weight = layer.weight.grad.clone()
    layer.zero_grad()
    found = gradient(layer, recipe, x, dy, fp8_grad=True)
    quantizer = recipe.quantizers("Linear", "").grad_output
    assert isinstance(found, te.QuantizedTensor) and found.shape == x.shape and found.dtype == x.dtype
    assert found.quantizer == quantizer and torch.equal(layer.weight.grad, weight)
    if quantizer.needs_key():
        values = found.dequantize()
        assert (values - plain).norm() < 0.3 * plain.norm()
        assert torch.equal(values, gradient(layer, recipe, x, dy, fp8_grad=True).dequantize())
    else:
        assert torch.equal(found.dequantize(), quantizer.quantize(plain.view(32, 64)).dequantize().view(x.shape))


def test_usages_decide_the_buffers_and_a_layer_before_takes_it() -> None:
    first, second = te.Linear(64, 64), te.Linear(64, 32)
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    assert list(gradient(second, RECIPES["block"], x, dy, fp8_grad=True).fields) == [
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
    ]  # fmt: skip
    own = te.CustomRecipe(
        qfactory=lambda role: (
            te.Float8CurrentScalingQuantizer()
            if role.tensor_type != "grad_output"
            else te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, rowwise=True, columnwise=False)
        )
    )
    found = gradient(second, own, x, dy, fp8_grad=True)
    assert not found.quantizer.columnwise and found.quantizer.fp8_dtype == torch.float8_e5m2
    with te.autocast(recipe=RECIPES["mxfp8"]):
        second(first(x), fp8_grad=True).backward(dy)
    assert torch.isfinite(first.weight.grad).all() and first.weight.grad.abs().sum() > 0
    assert type(gradient_in_high_precision(second, x, dy)) is Tensor


def gradient_in_high_precision(layer: te.Linear, x: Tensor, dy: Tensor) -> Tensor:
    part = x.clone().requires_grad_()
    layer(part, fp8_grad=True).backward(dy)
    assert part.grad is not None
    return part.grad


def test_delayed_scaling_has_a_history_of_outputs_and_input_gradients() -> None:
    """The scale of a step is 448 (57344) over the largest of the steps before; the first one is 1."""
    recipe = te.DelayedScaling(amax_history_len=3)
    layer = te.Linear(64, 32)
    plain = copy.deepcopy(layer)
    outputs, gradients = [1.0], [1.0]
    amaxes: list[tuple[float, float]] = []
    for step in range(3):
        x, dy = (step + 1) * torch.randn(16, 64), (3 - step) * torch.randn(16, 32)
        parts = [x.clone().requires_grad_() for _ in range(2)]
        with te.autocast(recipe=recipe):
            y = layer(parts[0], fp8_output=True, fp8_grad=True)
        with te.autocast(recipe=recipe):
            expected = plain(parts[1])
        y.backward(dy)
        expected.backward(dy)
        ends = (
            (y, expected, outputs, torch.float8_e4m3fn),
            (parts[0].grad, parts[1].grad, gradients, torch.float8_e5m2),
        )
        for found, values, scales, dtype in ends:
            assert isinstance(found, te.Float8Tensor) and found.quantizer.fp8_dtype == dtype
            live = te.Float8Quantizer(torch.tensor(scales[-1]), None, dtype)
            torch.testing.assert_close(found.dequantize(), live.quantize(values.detach()).dequantize(), rtol=0, atol=0)
        te.update_delayed_scaling([layer, plain])
        amaxes.append((expected.abs().max().item(), parts[1].grad.abs().max().item()))
        outputs.append(448 / max(a for a, _ in amaxes[-3:]))
        gradients.append(57344 / max(a for _, a in amaxes[-3:]))
    meta = layer.fp8_meta
    torch.testing.assert_close(meta["scaling_fwd"].scale[2].item(), outputs[-1])
    torch.testing.assert_close(meta["scaling_bwd"].scale[1].item(), gradients[-1])
    assert plain.fp8_meta["scaling_fwd"].scale[2] == 1 and meta["scaling_fwd"].amax_history[-1, 2] == amaxes[-1][0]
    again = te.Linear(64, 32)
    again.load_state_dict(layer.state_dict())
    for name, value in layer.recipe_state().items():
        assert torch.equal(again.recipe_state()[name], value), name
    names = {f"fp8_outer_{n}" for n in ("scale", "amax", "history")}
    assert set(layer.recipe_state()) - set(plain.recipe_state()) == names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_compiled(name: str) -> None:
    recipe = RECIPES.get(name, te.DelayedScaling())
    layer, x = te.Linear(64, 32), torch.randn(16, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for function in (copy.deepcopy(layer), compiled):
        for _ in range(2):
            with te.autocast(recipe=recipe):
                y = function(x, fp8_output=True)
        found.append(y.dequantize())
    assert torch.equal(*found) and (name != "delayed" or layer.fp8_outer_scale[0] != 1)
    said = "fp8_grad is True in a compiled function, out of whose graph torch"
    with te.autocast(recipe=recipe), pytest.raises(Exception, match=said):
        compiled(x.clone().requires_grad_(), fp8_grad=True)
