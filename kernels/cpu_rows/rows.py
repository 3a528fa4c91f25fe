"""What eager code on CPU does to rows between GEMMs, in one C++ pass each, with the bits of the definitions: norms,
rotations, activations, and the sums of what experts return.

Written in torch, each is five to eight operations that read and write memory in turn and take microseconds to call: of
a prompt's forward pass in bfloat16 they are a tenth, of one token's a third. Here x is read once. Every function
returns None where its definition has to run: where a gradient is wanted, where something is traced, for other dtypes,
and on a machine without a library.

D channels of a row, side by side in memory.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import cpp_library
from ..backend import Backend, Compiled, choose, fallbacks, has_library
from ..custom_op import takes
from ..quantize.cpu import rounding as shared
from ..threads import threads_for

_ONE_ROW = 2**15
"""Channels from which torch's threads share the sum of a single row."""
_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "te_rms_norm": (_P, _P, _P, *(_N,) * 5, _FLOAT, _INT, _INT, _INT),
    "te_rotate": (_P, _P, _P, _P, *(_N,) * 7, _INT, _INT),
    "te_activate": (_P, _P, _P, _P, *(_N,) * 3, _INT, _INT),
    "te_sum_slots": (_P, _P, _P, _P, *(_N,) * 4, _INT),
}
_NORM = takes("x: T [..., D]; weight: T [D]?", T=shared.DTYPES)
_ROPE = takes(
    "x: T [B, S, N, D]; cos: float32 [C, S, H]; sin: float32 [C, S, H]; C == B or C == 1; 2 * H <= D", T=shared.DTYPES
)
_ACTIVATION = takes("x: T [*B, F]; probabilities: float32|bfloat16|float16 [*B]?", T=shared.DTYPES)
_SLOTS = takes(
    "y: T [R, H]; row_of_slot: int64 [S, K]; weights: float32|bfloat16|float16 [S, K]?; K > 0", T=shared.DTYPES
)


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    """Return a function of the library of a dtype."""
    result = _INT if name == "te_sum_slots" else None
    return cpp_library.function("rows.cpp", {"INPUT": shared.NAMES[dtype]}, name, _ARGUMENTS[name], result)


ROWS = Compiled("arithmetic of rows", lambda dtype: _function("te_rotate", dtype), shared.DTYPES)


def _strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x [..., N, D], or a copy, and of the rows of its last two dimensions how many there are and how far apart
    the first ones and their neighbours lie."""
    channels = x.shape[-1]
    inner = x.shape[-2] if x.dim() > 1 else 1
    if x.is_contiguous():
        return x, inner, inner * channels, channels
    if x.dim() < 3 or (x.stride(-1) != 1 and channels > 1):
        return x.contiguous(), inner, inner * channels, channels
    outer, several = x.stride(-3), None  # of a dimension of one row the stride says nothing
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2]), strict=True):
        if size > 1 and several is not None and stride != several:
            return x.contiguous(), inner, inner * channels, channels
        if size > 1:
            outer, several = (stride if several is None else outer), stride * size
    return x, inner, outer, x.stride(-2)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, weight_last: bool) -> Tensor | None:
    """Return `kernels.norm.reference.rms_norm` of x [..., D], or None. weight: [D] or None."""
    if choose(ROWS, x) is not Backend.COMPILED or _NORM.misfit_on_cpu(x, weight) or not _sums_as_torch():
        return None
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        return None
    channels = x.shape[-1]
    if (x.stride(-1) != 1 and channels > 1) or x.numel() == channels >= _ONE_ROW:
        return None  # torch adds these up in another order
    if not x.is_contiguous():
        rows = zip(x.shape[:-1], x.stride()[:-1], strict=True)
        if any(size > 1 and stride < channels for size, stride in rows):
            return None  # those that overlap, likewise
    weight = None if weight is None else weight.contiguous()
    x, *strides = _strides(x)
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    _function("te_rms_norm", x.dtype)(
        x.data_ptr(),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        x.numel() // channels,
        channels,
        *strides,
        eps,
        zero_centered,
        weight_last,
        threads_for(x.numel()),
    )
    return out


@functools.cache
def _sums_as_torch() -> bool:
    """Whether torch adds the numbers of a row up in the order that the library follows: how is not part of what torch
    promises, so that each process compares."""
    lengths, eps = (7, 100, 576, 5000), 1e-5
    if not has_library(ROWS, torch.float32):
        return False
    for length in lengths:
        x = torch.randn(4, length, generator=torch.Generator().manual_seed(length), dtype=torch.float32, device="cpu")
        found = torch.empty_like(x)
        sizes = 4, length, 1, length, 0
        _function("te_rms_norm", x.dtype)(x.data_ptr(), None, found.data_ptr(), *sizes, eps, 0, 1, 1)
        if not torch.equal(found, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)):
            fallbacks["torch adds rows up in another order"] += 1
            return False
    return True


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
    """Return `kernels.rope.reference.apply_rope` of x [B, S, N, D], or None. cos, sin: float32 [B or 1, S, R/2]."""
    if choose(ROWS, x) is not Backend.COMPILED or _ROPE.misfit_on_cpu(x, cos, sin):
        return None
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return None
    batch, length, heads, channels = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    x, *strides = _strides(x)
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    _function("te_rotate", x.dtype)(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        batch * length * heads,
        channels,
        cos.shape[-1],
        *strides,
        cos.shape[0] * length,
        interleaved,
        threads_for(x.numel()),
    )
    return out


@functools.cache
def _table(function: Callable[[Tensor], Tensor], apart: bool) -> Tensor:
    """Return what a function makes of every bfloat16, in the order of their bits, in one piece of memory or in rows
    that lie apart: of the former torch's gelu makes NaN of infinity."""
    with torch.inference_mode(False), torch.no_grad():
        bits = torch.arange(2**16, dtype=torch.int32, device="cpu")
        every = torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16).view(torch.bfloat16)
        if not apart:
            return function(every)
        part = torch.empty(64, 2**11, dtype=torch.bfloat16, device="cpu")[:, : 2**10].copy_(every.view(64, -1))
        return function(part).contiguous()


def activate_rows(
    x: Tensor, function: Callable[[Tensor], Tensor], gated: bool, probabilities: Tensor | None
) -> Tensor | None:
    """Return `function(x)`, or of x = [gate | up] `function(gate) * up`, times probabilities [...] by row, or None: of
    x [..., D] in bfloat16, whose activations are looked up, or with gates alone in float32."""
    if x.dim() == 0 or (x.dtype != torch.bfloat16 and not gated) or choose(ROWS, x) is not Backend.COMPILED:
        return None
    if probabilities is not None and probabilities.requires_grad and torch.is_grad_enabled():
        return None
    if x.dtype != torch.bfloat16:
        gate, up = x.chunk(2, dim=-1)
        return function(gate).mul_(up) if probabilities is None else None
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    if gated and x.shape[-1] % 2:
        return None
    if _ACTIVATION.misfit_on_cpu(x, probabilities):
        return None
    probabilities = None if probabilities is None else probabilities.float().contiguous()
    apart = not (x[..., :width] if gated else x).is_contiguous()
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device="cpu")
    _function("te_activate", x.dtype)(
        x.data_ptr(),
        _table(function, apart).data_ptr(),
        None if probabilities is None else probabilities.data_ptr(),
        out.data_ptr(),
        math.prod(x.shape[:-1]),
        width,
        x.shape[-1],
        gated,
        threads_for(x.numel()),
    )
    return out


def sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return `kernels.permute.reference.sum_slots` of y [R, D], or None. row_of_slot: int64 [T, K]; weights: [T, K]."""
    if dtype != y.dtype or choose(ROWS, y) is not Backend.COMPILED or _SLOTS.misfit_on_cpu(y, row_of_slot, weights):
        return None
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        return None
    tokens, slots = row_of_slot.shape
    y, row_of_slot = y.contiguous(), row_of_slot.contiguous()
    weights = None if weights is None else weights.float().contiguous()
    out = y.new_empty((tokens, y.shape[1]))
    outside = _function("te_sum_slots", dtype)(
        y.data_ptr(),
        row_of_slot.data_ptr(),
        None if weights is None else weights.data_ptr(),
        out.data_ptr(),
        tokens,
        slots,
        y.shape[1],
        y.shape[0],
        threads_for(y.numel()),
    )
    return None if outside else out
