"""One token of rules that carry a state, on CPU, eagerly, where no gradient is wanted: the state is read once.

B batch, Hk heads of q and k, H heads of v, K and V channels; H heads of P channels, G groups, N states.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .. import cpp_library
from ..backend import PLAIN, Backend, Compiled, choose
from ..compiling import compiling
from ..gemm.gemv import without_instructions
from ..threads import threads_for

_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "te_delta_step": (*(_P,) * 8, *(_N,) * 5, _INT, _FLOAT, _INT),
    "te_space_step": (*(_P,) * 9, *(_N,) * 5, _INT),
}


@functools.cache
def _function(name: str, narrow: bool = False) -> Any:
    """Return a step. narrow: with AVX2 alone."""
    defined = {"INPUT": "Float32"} | ({"NARROW": ""} if narrow else {})
    return cpp_library.function("recurrent_step.cpp", defined, name, _ARGUMENTS[name])


def _load(dtype: torch.dtype) -> None:
    for name in _ARGUMENTS:
        _function(name)


STEPS = Compiled("a token of a rule with a state", _load, (torch.float32,), against=without_instructions)


def uses_recurrent_step(width: int, *tensors: Tensor | None) -> bool:
    """Whether a step computes with these tensors, of which the first has some elements: plain ones on CPU, none of them
    float64 or wanting a gradient. width: of a row of the state."""
    if width % 16 or compiling():
        return False
    operands = [x for x in tensors if x is not None]
    if any(
        type(x) not in PLAIN or not x.is_cpu or not x.is_floating_point() or x.dtype == torch.float64 for x in operands
    ):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return False
    return choose(STEPS, operands[0], torch.float32) is Backend.COMPILED


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [B, 1, H, V] in v's dtype and the next state [B, H, K, V], as the definition of the gated delta rule,
    or without beta of linear attention. q, k: [B, 1, Hk, K]; v: [B, 1, H, V]; g: [B, 1, H] or [B, 1, H, K]; beta: [B,
    1, H]; state: [B, H, K, V] or None."""
    (batch, _, heads, V), (key_heads, K) = v.shape, k.shape[2:]
    out = torch.empty(v.shape, dtype=torch.float32, device="cpu")
    after = torch.empty((batch, heads, K, V), dtype=torch.float32, device="cpu")
    operands = [None if x is None else x.float().contiguous() for x in (q, k, v, g.float().exp(), beta, state)]
    sizes = (batch, heads, heads // max(key_heads, 1), K, V, g.dim() == 4)
    _function("te_delta_step")(*_addresses(*operands, out, after), *sizes, scale, threads_for(after.numel() * 0.3))
    return out.to(v.dtype), after


def space_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y [B, 1, H, P] in x's dtype and the next state [B, H, P, N], as the definition of Mamba-2's scan. x: [B,
    1, H, P]; dt: [B, 1, H]; A, D: [H]; B, C: [B, 1, G, N]; state: [B, H, P, N] or None."""
    (batch, _, heads, P), (groups, N) = x.shape, B.shape[2:]
    y = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    after = torch.empty((batch, heads, P, N), dtype=torch.float32, device="cpu")
    operands = [None if z is None else z.float().contiguous() for z in (x, dt, A, B, C, D, state)]
    sizes = (batch, heads, heads // max(groups, 1), P, N)
    _function("te_space_step")(*_addresses(*operands, y, after), *sizes, threads_for(after.numel() * 0.3))
    return y.to(x.dtype), after


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]
