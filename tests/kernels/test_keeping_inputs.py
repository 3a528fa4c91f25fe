"""Eager norms and activations on a CPU keep only their inputs, with the bits of autograd under every derivative."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels import activation, norm

Function = Callable[[Tensor, Tensor], Tensor]
CALLS: dict[str, tuple[ModuleType, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "rms_norm": (norm, lambda its, x, w: its.rms_norm(x, w, 1e-5)),
    "layer_norm": (norm, lambda its, x, w: its.layer_norm(x, w, w * 2, 1e-5, zero_centered=True)),
    "gelu": (activation, lambda its, x, w: its.activation(x * w, "gelu_tanh")),
    "swiglu": (activation, lambda its, x, w: its.gated_activation(x, probabilities=w.sum() * x[..., 0])),
    "clamped": (activation, lambda its, x, w: its.gated_activation(x * w, clamp=1.0, alpha=1.7, up_offset=1.0)),
}
CASES: dict[str, tuple[Function, Function]] = {
    name: (partial(call, module), partial(call, module.reference)) for name, (module, call) in CALLS.items()
}


def _inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 4, 64, dtype=dtype).requires_grad_(), torch.randn(64, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_reference(case: str) -> None:
    found, right = (torch.autograd.grad(f(*(inputs := _inputs())).square().sum(), inputs) for f in CASES[case])
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_second_gradients_are_those_of_the_reference(case: str) -> None:
    """But for the order of sums: the function has run twice."""
    found, right = (_second_gradients(function) for function in CASES[case])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def _second_gradients(function: Function) -> tuple[Tensor, ...]:
    inputs = _inputs(torch.float32)
    gradients = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("case", CASES)
def test_transforms_are_those_of_the_reference(case: str) -> None:
    inputs = tuple(t.detach() for t in _inputs(torch.float32))
    for transform in (
        lambda f: torch.func.vjp(f, *inputs)[1](torch.ones_like(f(*inputs)))[0],
        lambda f: torch.func.jvp(f, inputs, inputs)[1],
        lambda f: torch.func.vmap(f, (0, None))(*inputs),
    ):
        found, right = (transform(function) for function in CASES[case])
        assert torch.equal(found, right)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(inputs[0].clone().requires_grad_(), inputs[0])
        found, right = (torch.autograd.forward_ad.unpack_dual(f(x, inputs[1])).tangent for f in CASES[case])
    assert found is not None and torch.equal(found, right)


def test_a_frozen_weight_gets_no_gradient_and_a_trained_one_does_beside_a_constant_input() -> None:
    for x_trains, weight_trains in ((True, False), (False, True)):
        x, weight = _inputs()
        norm.rms_norm(x.requires_grad_(x_trains), weight.requires_grad_(weight_trains), 1e-5).sum().backward()
        assert (x.grad is not None, weight.grad is not None) == (x_trains, weight_trains)


def test_nothing_but_the_inputs_is_kept() -> None:
    x, weight = _inputs()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        norm.rms_norm(x, weight, 1e-5)
        norm.layer_norm(x, weight, None, 1e-5)
        activation.gated_activation(x)
        activation.activation(x, "quick_gelu")
    storages = {t.untyped_storage().data_ptr() for t in kept}
    assert storages == {t.untyped_storage().data_ptr() for t in (x, weight)}
