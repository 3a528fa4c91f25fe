"""Public activations. On CPU the reference runs, fused by Inductor, or eager, keeping its inputs alone; on an
accelerator registered kernels."""

from types import SimpleNamespace

import torch
from torch import Tensor

from te_models.suggestions import check_choice

from ..backend import definitions_only
from ..cpu_rows import activate_rows
from ..custom_op import FLOATS, Output, absent, like, operation, register_gradient, takes
from ..derivative import keeping_inputs
from ..launch import as_matrix
from . import reference
from .reference import ACTIVATIONS, ActivationKind


def _result(x: Tensor, kind: ActivationKind) -> Output:
    return like(x, (*x.shape[:-1], x.shape[-1] // 2 if kind.gated else x.shape[-1]))


TAKES = takes(f"x: {FLOATS} [*B, F]; probabilities: {FLOATS} [*B]?; kind: value; not kind.gated or F % 2 == 0")


@operation("activation_fwd", _result, takes=TAKES)
def activation_fwd(x: Tensor, probabilities: Tensor | None, kind: ActivationKind) -> Tensor:
    """Return `act(x)` [..., F], or `act(gate) * up` of x = [gate | up] [..., 2F]; runs in Triton.

    probabilities: [...], a factor of each row, or None. Differentiable once in x and probabilities.
    """
    from . import triton

    y = triton.activation_fwd(as_matrix(x), flat_probabilities(probabilities), kind)
    return y.view(*x.shape[:-1], y.shape[-1])


def _gradients(x: Tensor, needs_probabilities: bool) -> tuple[Output, Output]:
    return like(x), like(x, x.shape[:-1], torch.float32) if needs_probabilities else absent(x, torch.float32)


_GRADIENTS_TAKE = takes(
    f"dy: {FLOATS} [*B, F]; x: {FLOATS} [*B, W]; probabilities: {FLOATS} [*B]?; kind: value; W == F * (1 + kind.gated)"
)


@operation("activation_bwd", _gradients, takes=_GRADIENTS_TAKE)
def activation_bwd(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, kind: ActivationKind, needs_probabilities: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the probabilities (float32, empty unless asked for) of `activation_fwd`."""
    from . import triton

    matrices = (as_matrix(dy), as_matrix(x), flat_probabilities(probabilities))
    dx, d_probabilities = triton.activation_bwd(*matrices, kind, needs_probabilities)
    return dx.view(x.shape), d_probabilities.view(x.shape[:-1]) if needs_probabilities else d_probabilities


def flat_probabilities(probabilities: Tensor | None) -> Tensor | None:
    return None if probabilities is None else probabilities.reshape(-1)


@register_gradient(activation_fwd, saves=("x", "probabilities", *ActivationKind._fields))
def _backward(saved: SimpleNamespace, needs: set[str], dy: Tensor) -> dict[str, Tensor]:
    kind = (getattr(saved, name) for name in ActivationKind._fields)
    wanted = "probabilities" in needs
    dx, d_probabilities = activation_bwd(dy, saved.x, saved.probabilities, *kind, wanted)
    return {"x": dx, "probabilities": d_probabilities.to(saved.probabilities.dtype)} if wanted else {"x": dx}


def activation(x: Tensor, name: str, *, probabilities: Tensor | None = None) -> Tensor:
    """Return `act(x)`, same shape and dtype; with probabilities [...] times each row's, in float32, rounded again.

    x: [..., F]; name: a key of ACTIVATIONS. Raises ValueError for another name.
    """
    check_name(name)
    return activated_by_kind(x, ActivationKind(name), probabilities)


def gated_activation(
    x: Tensor,
    name: str = "silu",
    *,
    clamp: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    probabilities: Tensor | None = None,
) -> Tensor:
    """Return `act(gate) * up` of x = [gate | up] (arXiv 2002.05202): [..., 2F] -> [..., F].

    With `clamp` (gpt-oss): gate <= clamp, |up| <= clamp, and the result is
    `gate * sigmoid(alpha * gate) * (up + up_offset)`. With probabilities [...]: times each row's, in float32, rounded
    again: so a mixture can weight its rows before the second projection. Raises ValueError for an unknown name.
    """
    check_name(name)
    return activated_by_kind(x, ActivationKind(name, True, clamp, alpha, up_offset), probabilities)


def activated_by_kind(x: Tensor, kind: ActivationKind, probabilities: Tensor | None) -> Tensor:
    """Return the activation of x, by the kernel or the definition."""
    if x.device.type == "cuda" and not definitions_only() and not TAKES.misfit(x, probabilities, kind):
        return activation_fwd(x, probabilities, *kind)
    return keeping_inputs(lambda x, factor: in_one_pass(x, kind, factor), x, probabilities)


_ARITHMETIC = ("relu", "squared_relu")
"""Activations that torch computes in less time than a table is read in."""


def in_one_pass(x: Tensor, kind: ActivationKind, probabilities: Tensor | None) -> Tensor:
    """Return the definition's activation, in one pass where no gradient is wanted and nothing traced."""
    if kind.clamp is None and kind.name not in _ARITHMETIC:
        found = activate_rows(x, ACTIVATIONS[kind.name], kind.gated, probabilities)
        if found is not None:
            return found
    return reference.activate(x, kind, probabilities)


def check_name(name: str) -> None:
    check_choice("the activation", name, ACTIVATIONS)
