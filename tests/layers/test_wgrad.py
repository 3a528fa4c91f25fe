"""Weight gradients that are fused into main gradients or delayed: only those that are wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, autocast, ops, recipe

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


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
@pytest.mark.parametrize(
    "kind", [Linear, LayerNormLinear, LayerNormMLP, experts, GroupedLinear], ids=lambda kind: kind.__name__
)
def test_the_first_micro_batch_writes_to_main_gradients(
    kind: Callable[..., nn.Module], name: str, delayed: bool
) -> None:
    """Scripts that tell Transformer Engine which one is the first zero nothing; sums grew over all steps."""
    torch.manual_seed(0)
    sizes = {"GroupedLinear": (3, 64, 32), "experts": ()}.get(kind.__name__, (64, 32))
    layer = kind(*sizes, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    weights = [p for n, p in layer.named_parameters() if "weight" in n and "layer_norm" not in n]
    rest = (SPLITS,) if isinstance(layer, GroupedLinear) else ()

    def run(first: bool | None, batch: Tensor) -> list[Tensor]:
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            layer(batch, *rest, is_first_microbatch=first).sum().backward()
        if delayed:
            layer.backward_dw()
        return [weight.main_grad.clone() for weight in weights]

    batches = torch.randn(2, 16, 64)
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, 7.0)
    one = run(True, batches[0])
    assert all(grad.abs().max() > 0 for grad in one)
    both = run(False, batches[1])
    assert all(torch.equal(a, b) for a, b in zip(one, run(True, batches[0]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(both, run(False, batches[1]), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, both, strict=True))
