"""Norms, forward and forward + backward, against torch and Liger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.norm import layer_norm, rms_norm

from .case import Case, Run, installed, nbytes, near
from .shapes import Shapes

EPS = 1e-6
# bfloat16 results of sums in float32: a rounding or two apart
LIMIT = 2.0**-7


def cases(device: torch.device, shapes: Shapes) -> Iterator[Callable[[], Case]]:
    """Yield what builds each case."""
    for rows, hidden in shapes.norms:
        for kind in ("RMSNorm", "LayerNorm"):
            for backward in (False, True):
                yield lambda r=rows, h=hidden, k=kind, b=backward: _case(device, r, h, k, b)


def _case(device: torch.device, rows: int, hidden: int, kind: str, backward: bool) -> Case:
    x, dy = (torch.randn(rows, hidden, device=device).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(hidden, device=device).bfloat16() for _ in range(2))
    parameters = (weight,) if kind == "RMSNorm" else (weight, bias)
    for tensor in (x, *parameters):
        tensor.requires_grad_(backward)
    functions, missing = _functions(kind, weight, bias)

    def run_of(function: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> Run:
        if not backward:
            return lambda: function(x)
        return lambda: torch.autograd.grad(function(x), inputs, dy)

    sides = {name: run_of(function, (x, *mine)) for name, (function, mine) in functions.items()}
    # forward reads x and writes y; backward reads x and dy and writes dx
    moved = nbytes(x, x) + (nbytes(x, dy, x) if backward else 0)
    peers = tuple(name for name in sides if name != "ours")
    return Case(
        f"{kind} {'forward + backward' if backward else 'forward'}, {rows} x {hidden}",
        sides,
        lambda results: near(results, "torch", dict.fromkeys(results, LIMIT)),
        moved,
        over={"ours": peers},
        missing=missing,
    )


def _functions(kind: str, weight: Tensor, bias: Tensor) -> tuple[dict[str, Any], dict[str, str]]:
    """Return each side's function and its parameters, and the peers that are missing."""
    shape = (weight.shape[0],)
    own = (weight,) if kind == "RMSNorm" else (weight, bias)
    if kind == "RMSNorm":
        sides = {
            "ours": (lambda x: rms_norm(x, weight, EPS), own),
            "torch": (lambda x: nn.functional.rms_norm(x, shape, weight, EPS), own),
        }
    else:
        sides = {
            "ours": (lambda x: layer_norm(x, weight, bias, EPS), own),
            "torch": (lambda x: nn.functional.layer_norm(x, shape, weight, bias, EPS), own),
        }
    if installed("liger-kernel") is None:
        return sides, {"Liger": "liger-kernel is not installed"}
    from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm  # pyright: ignore[reportMissingImports]

    # in place it would overwrite the gradient that all sides share
    module = LigerRMSNorm(shape[0], eps=EPS, in_place=False) if kind == "RMSNorm" else LigerLayerNorm(shape[0], eps=EPS)
    module = module.to(weight)
    with torch.no_grad():
        for mine, given in zip((module.weight, getattr(module, "bias", None)), own, strict=False):
            mine.copy_(given)
    mine = (module.weight,) if kind == "RMSNorm" else (module.weight, module.bias)
    for parameter in mine:
        parameter.requires_grad_(weight.requires_grad)
    sides["Liger"] = (module, mine)
    return sides, {}
