"""Activations of the MLP, in the input's dtype, as published models apply them (PyTorch rounds once per call)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUICK_GELU_ALPHA = 1.702
"""Of `x sigmoid(alpha x)`, the sigmoid approximation of GELU (arXiv 1606.08415, section 2)."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _quick_gelu(x: Tensor) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.sigmoid(QUICK_GELU_ALPHA * exact)).to(x.dtype)  # rounded once, as torch's own are


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "sigmoid": torch.sigmoid,
    "quick_gelu": _quick_gelu,
}


def activation(x: Tensor, name: str, *, probabilities: Tensor | None = None) -> Tensor:
    """Return `act(x)`, same shape and dtype, times probabilities [...] by row. name: a key of ACTIVATIONS."""
    return _weighted(ACTIVATIONS[name](x), probabilities)


def gated_activation(
    x: Tensor,
    name: str = "silu",
    *,
    clamp: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    probabilities: Tensor | None = None,
) -> Tensor:
    """Return `act(gate) * up` of x = [gate | up], times probabilities [...] by row: [..., 2F] -> [..., F]."""
    gate, up = x.chunk(2, dim=-1)
    if clamp is None:
        return _weighted(ACTIVATIONS[name](gate) * up, probabilities)
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return _weighted(gate * torch.sigmoid(alpha * gate) * (up + up_offset), probabilities)


class ActivationKind(NamedTuple):
    """Which activation, plain or gated, and the options of `gated_activation`."""

    name: str
    gated: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0


def activate(x: Tensor, kind: ActivationKind, probabilities: Tensor | None) -> Tensor:
    """Return the `activation` or the `gated_activation` of x."""
    if not kind.gated:
        return activation(x, kind.name, probabilities=probabilities)
    options = {"clamp": kind.clamp, "alpha": kind.alpha, "up_offset": kind.up_offset}
    return gated_activation(x, kind.name, **options, probabilities=probabilities)


def _weighted(y: Tensor, probabilities: Tensor | None) -> Tensor:
    return y if probabilities is None else (y.float() * probabilities[..., None].float()).to(y.dtype)
