"""Weight gradients that are fused into main gradients or delayed: only those that are wanted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_models.layers import GroupedLinear, LayerNormMLP, Linear, autocast, ops, recipe

SPLITS = torch.tensor([3, 5, 8])


def experts(**options: bool) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=False, **options)


@pytest.mark.parametrize(
    "layer",
    [
        Linear(64, 32, fuse_wgrad_accumulation=True),
        ops.Linear(64, 32, fuse_wgrad_accumulation=True),
        LayerNormMLP(64, 32, fuse_wgrad_accumulation=True),
        experts(fuse_wgrad_accumulation=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
def test_no_main_gradient_is_asked_for_where_none_is_written(layer: nn.Module, name: str | None) -> None:
    rest = (SPLITS,) if isinstance(layer, GroupedLinear) else ()
    with autocast(enabled=name is not None, recipe=name and recipe(name)):
        with torch.no_grad():
            y = layer(torch.ones(16, 64), *rest)
        x = torch.ones(16, 64, requires_grad=True)
        layer.requires_grad_(False)
        assert torch.equal(layer(x, *rest), y)
        layer(x, *rest).sum().backward()
        layer.requires_grad_(True)
        with pytest.raises(ValueError, match=r"needs weight.main_grad"):
            layer(x, *rest)
    assert torch.count_nonzero(x.grad) > 0


@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_member_gets_no_gradient(fused: bool, delayed: bool, name: str | None) -> None:
    x = torch.randn(16, 64)

    def gradients(layer: GroupedLinear) -> list[Tensor | None]:
        layer.weight1.requires_grad_(False)
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            layer(x, SPLITS).sum().backward()
        if layer._later is not None:
            layer.backward_dw()
        return [getattr(w, "main_grad", None) if w.grad is None else w.grad for w in layer.parameters()]

    expected = gradients(experts())
    layer = experts(fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed)
    for weight in (layer.weight0, layer.weight2) if fused else ():
        weight.main_grad = torch.zeros(weight.shape)
    found = gradients(layer)
    assert expected[1] is None and found[1] is None
    for g in (0, 2):
        torch.testing.assert_close(found[g], expected[g], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("written", ["x", "dy"])
@pytest.mark.parametrize("grouped", [False, True])
def test_what_a_delayed_gradient_reads_is_not_written_to(grouped: bool, written: str) -> None:
    """Its gradient was that of the values written."""
    layer = experts(delay_wgrad_compute=True) if grouped else Linear(64, 32, bias=False, delay_wgrad_compute=True)
    rest = (SPLITS,) if grouped else ()
    tensors = {"x": torch.randn(16, 64), "dy": torch.randn(16, 32)}
    layer(tensors["x"], *rest).backward(tensors["dy"])
    tensors[written].zero_()
    with pytest.raises(RuntimeError, match=r"was written to between the backward pass and backward_dw\(\)"):
        layer.backward_dw()
    with autocast(recipe=recipe("mxfp8")):
        layer(tensors["x"], *rest).backward(tensors["dy"])
    tensors[written].fill_(1.0)  # the quantized copies are the layer's own
    layer.backward_dw()
    assert all(weight.grad is not None for weight in layer.parameters())
