"""One grouped layer in its layouts: weights and biases each stacked, or one parameter per GEMM."""

import pytest
import torch

from te_models.layers import GroupedLinear, autocast, ops, quantized_model_init, recipe

LAYOUTS = [(weight, bias) for weight in (True, False) for bias in (True, False)]


@pytest.mark.parametrize(("weight", "bias"), LAYOUTS)
def test_the_bias_has_a_layout_of_its_own(weight: bool, bias: bool) -> None:
    """The same layer in all four layouts: states load, results and gradients are the same."""
    layouts = {"single_grouped_weight": weight, "single_grouped_bias": bias}
    layer, other = GroupedLinear(3, 64, 32, **layouts), ops.GroupedLinear(3, 64, 32, **layouts)
    whole = GroupedLinear(3, 64, 32)
    with torch.no_grad():
        whole.bias.normal_()
    names = (["weight"] if weight else [f"weight{g}" for g in range(3)]) + (
        ["bias"] if bias else [f"bias{g}" for g in range(3)]
    )
    assert sorted(layer.state_dict()) == sorted(names)
    other.load_state_dict(whole.state_dict())
    layer.load_state_dict(other.state_dict())
    x, splits, dy = torch.randn(9, 64), torch.tensor([4, 0, 5]), torch.randn(9, 32)
    found = []
    for one in (whole, layer, other):
        one.zero_grad()
        with autocast(recipe=recipe("mxfp8")):
            y = one(x, splits)
        y.backward(dy)
        found.append((y, *[torch.cat([p.grad.reshape(-1) for p in kind]) for kind in one.members()]))
    for result in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], result, strict=True))
    back = GroupedLinear(3, 64, 32)
    back.load_state_dict(layer.state_dict())
    assert torch.equal(back.bias, whole.bias) and torch.equal(back.weight, whole.weight)


@pytest.mark.parametrize("bias", [None, True, False])
def test_the_bias_follows_the_weight_unless_told_otherwise(bias: bool | None) -> None:
    layer = GroupedLinear(2, 32, 32, single_grouped_weight=False, single_grouped_bias=bias)
    assert layer.single_grouped_bias is bool(bias) and hasattr(layer, "bias") is bool(bias)
    assert ("bias=True (grouped), per-GEMM" in repr(layer)) is bool(bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_stored_weights_of_either_layout_compute_under_torch_autocast(name: str, dtype: torch.dtype) -> None:
    x, splits, found = torch.randn(48, 64), torch.tensor([16, 0, 32]), []
    for grouped in (True, False):
        torch.manual_seed(0)
        with quantized_model_init(recipe=recipe(name)):
            layer = GroupedLinear(3, 64, 32, single_grouped_weight=grouped, params_dtype=dtype)
        with torch.amp.autocast("cpu", torch.bfloat16), autocast(recipe=recipe(name)):
            y = layer(x, splits)
        y.float().square().sum().backward()
        found.append((y, torch.cat([p.grad.float().flatten() for p in layer.members()[0]])))
    assert found[0][0].dtype is torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
