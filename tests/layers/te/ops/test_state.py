"""Live state, weight caches and main gradients of operations are those of the modules."""

import pytest
import torch

import te_models.layers as te


def pair(kind: str, **options) -> tuple[torch.nn.Module, torch.nn.Module, tuple]:
    """A module, the operation with equal parameters, and extra inputs."""
    torch.manual_seed(0)
    if kind == "linear":
        module, operation, rest = te.Linear(64, 32, bias=False, **options), te.ops.BasicLinear(64, 32, **options), ()
    else:
        kinds = (te.GroupedLinear, te.ops.GroupedLinear)
        module, operation = (kind(2, 64, 32, bias=False, **options) for kind in kinds)
        rest = (torch.tensor([3, 5]),)
    operation.load_state_dict(module.state_dict())
    return module, operation, rest


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_calibration_records_the_same_amaxes(kind: str) -> None:
    *both, rest = pair(kind)
    x = torch.randn(8, 64)
    for layer in both:
        with te.autocast(enabled=False, calibrating=True, recipe=te.DelayedScaling()):
            layer(x, *rest)
    assert torch.count_nonzero(both[0].fp8_history) > 0
    assert torch.equal(both[0].fp8_history, both[1].fp8_history)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_cached_weights_serve_the_micro_batches(kind: str) -> None:
    _, operation, rest = pair(kind)
    x = torch.randn(8, 64)
    with te.autocast(recipe=te.recipe("mxfp8")):
        with te.microbatch(first=True):
            first = operation(x, *rest)
        with torch.no_grad():
            operation.weight.zero_()
        with te.microbatch(first=False):
            assert torch.equal(operation(x, *rest), first)
        assert torch.count_nonzero(operation(x, *rest)) == 0


@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_gradients_are_fused_into_main_gradients_or_delayed(kind: str, name: str | None) -> None:
    for options in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        *both, rest = pair(kind, **options)
        x = torch.randn(8, 64)
        for layer in both:
            layer.weight.main_grad = torch.ones(layer.weight.shape)
            with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
                y = layer(x, *rest)
            y.sum().backward()
            assert layer.weight.grad is None
            if "delay_wgrad_compute" in options:
                layer.backward_dw()
        found = [layer.weight.main_grad if layer.weight.grad is None else layer.weight.grad for layer in both]
        assert torch.count_nonzero(found[0] - 1) > 0 and torch.equal(*found)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_quantized_primary_weights(kind: str) -> None:
    with te.quantized_model_init(recipe=te.recipe("mxfp8")):
        *both, rest = pair(kind)
    assert isinstance(both[1].weight, te.QuantizedTensor)
    for name in ("mxfp8", None):
        x = torch.randn(8, 64)
        found = []
        for layer in both:
            layer.zero_grad()
            with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
                y = layer(x, *rest)
            y.sum().backward()
            found.append((y, layer.weight.grad))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    with pytest.raises(ValueError, match="stored as mxfp8"), te.autocast(recipe=te.recipe("block")):
        both[1](torch.randn(8, 64), *rest)


@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str)
@pytest.mark.parametrize("kind", ["linear", "grouped", "per gemm"])
def test_quantized_primary_weights_give_main_or_delayed_gradients_without_a_recipe(kind: str, options: dict) -> None:
    """The gradients are those of the parameter, not of the dequantized values that the GEMM reads."""
    x = torch.randn(8, 64)
    per_gemm = {"single_grouped_weight": False} if kind == "per gemm" else {}
    with te.quantized_model_init(recipe=te.recipe("mxfp8")):
        expected, *_ = pair(kind, **per_gemm)
        *both, rest = pair(kind, **options, **per_gemm)
    expected(x, *rest).sum().backward()
    for layer in both:
        for weight in layer.parameters():
            weight.main_grad = torch.zeros(weight.shape)
        y = layer(x, *rest)
        y.sum().backward()
        if "delay_wgrad_compute" in options:
            layer.backward_dw()
        assert torch.equal(y, expected(x, *rest))
        for weight, other in zip(layer.parameters(), expected.parameters(), strict=True):
            found = weight.main_grad if weight.grad is None else weight.grad
            torch.testing.assert_close(found, other.grad)
            assert torch.count_nonzero(found) > 0
