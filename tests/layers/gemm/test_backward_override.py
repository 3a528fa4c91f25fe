"""backward_override: gradients from the original operands, or from what the quantized ones stand for."""

import pytest
import torch

from te_models.layers import GroupedLinear, Linear, autocast, quantized_model_init, recipe

RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]
SPLITS = torch.tensor([5, 0, 11])


def run(
    name: str, override: str, grouped: bool, backend: str | None = None, stored: bool = False
) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    chosen = recipe(name, backward_override=override)
    with quantized_model_init(enabled=stored, recipe=chosen):
        layer = GroupedLinear(3, 64, 48, bias=False) if grouped else Linear(64, 48, bias=False)
    x, dy = torch.randn(16, 64).requires_grad_(), torch.randn(16, 48)
    function = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    with autocast(recipe=chosen):
        y = function(x, SPLITS) if grouped else function(x)
    y.backward(dy)
    w = layer.weight.detach()
    return y.detach(), x.detach(), w.dequantize() if stored else w, dy, x.grad, layer.weight.grad


def exact(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, grouped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx and dw of a product without quantization."""
    if not grouped:
        return dy @ w, dy.t() @ x
    parts = list(zip(dy.split(SPLITS.tolist()), x.split(SPLITS.tolist()), w, strict=True))
    return torch.cat([d @ m for d, _, m in parts]), torch.stack([d.t() @ a for d, a, _ in parts])


@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "primary"])
def test_high_precision_uses_the_original_operands(name: str, grouped: bool, stored: bool) -> None:
    y, x, w, dy, dx, dw = run(name, "high_precision", grouped, stored=stored)
    expected = exact(x, w, dy, grouped)
    torch.testing.assert_close(dx, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, expected[1], rtol=1e-5, atol=1e-5)
    plain = torch.nn.functional.linear(x, w) if not grouped else None
    assert plain is None or not torch.allclose(y, plain, rtol=1e-5, atol=1e-5), "fprop is not quantized"


@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
@pytest.mark.parametrize("name", RECIPES)
def test_dequantized_uses_what_fprop_multiplied(name: str, grouped: bool) -> None:
    _, x, w, dy, dx, dw = run(name, "dequantized", grouped)
    quantizers = recipe(name).quantizers("Linear", "")
    if name == "delayed":  # the first step's scale is one

        def through(t: torch.Tensor, quantizer) -> torch.Tensor:
            return t.to(quantizer.fp8_dtype).float()
    else:

        def through(t: torch.Tensor, quantizer) -> torch.Tensor:
            return quantizer.quantize(t).dequantize()

    if grouped:
        rows = [through(part, quantizers.input) if len(part) else part for part in x.split(SPLITS.tolist())]
        x, w = torch.cat(rows), torch.stack([through(member, quantizers.weight) for member in w])
    else:
        x, w = through(x, quantizers.input), through(w, quantizers.weight)
    expected = exact(x, w, dy, grouped)
    torch.testing.assert_close(dx, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(name: str, override: str, backend: str) -> None:
    torch.testing.assert_close(run(name, override, False, backend), run(name, override, False), rtol=0, atol=0)


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="backward_override is 'bf16'; allowed: None, 'high_precision', 'dequantized'"):
        recipe("mxfp8", backward_override="bf16")
