"""The compiled library of moments in few bits, and of AdamW's steps on them."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import cpp_library
from ...backend import Backend, Compiled, choose, has_library
from ...compiling import compiling
from ...custom_op import Takes, apart, takes
from ...threads import threads_for
from ..hashed import hash_words
from . import rounding as shared

BLOCK = 128
_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "te_encode_moments": (*(_P,) * 6, _N, *(ctypes.c_int32,) * 3, _INT),
    "te_round_moments": (*(_P,) * 4, _N, *(ctypes.c_int32,) * 3, _INT),
    "te_decode_moments": (*(_P,) * 6, _N, _INT),
    "te_adamw_float8": (*(_P,) * 6, _N, _P, *(ctypes.c_int32,) * 2, _P, _INT),
    "te_adamw_float32": (*(_P,) * 4, _N, _P, _INT),
    "te_adamw_bfloat16": (*(_P,) * 4, _N, _P, *(ctypes.c_int32,) * 2, _P, _INT),
}
_ENCODE = "te_encode_moments"


_BOTH = takes("first: float32 [*S] contiguous; second: float32 [*S] contiguous")
_STORED = takes(
    "first: float8_e4m3fn contiguous; first_scale_inv: float32 contiguous; second: float8_e4m3fn contiguous;"
    "second_scale_inv: float32 contiguous; blocks: value; first_scale_inv.numel() == blocks;"
    "second_scale_inv.numel() == blocks; first.numel() == blocks * 128 and second.numel() == blocks * 128"
)
_FLOAT8 = takes(
    "weight: float32|bfloat16 [*S] written; gradient: float32|bfloat16 [*S] contiguous;"
    "first: float8_e4m3fn written; first_scale_inv: float32 written;"
    "second: float8_e4m3fn written; second_scale_inv: float32 written;"
    "first.numel() == second.numel() == 128 * first_scale_inv.numel() == 128 * second_scale_inv.numel();"
    "first_scale_inv.numel() == -(-weight.numel() // 128)"
)
_PLAIN = takes(
    "weight: float32|bfloat16 [*S] written; gradient: float32|bfloat16 [*S] contiguous; first: T written;"
    "second: T written; first.numel() == second.numel() == weight.numel()",
    T=(torch.float32, torch.bfloat16),
)


def _writes(out: Sequence[Tensor], read: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether results of these dtypes may be written to `out`: contiguous, and no memory of what is read."""
    alike = [t.dtype for t in out] == [*dtypes] and all(t.is_contiguous() for t in out)
    return alike and apart(out, read)


@functools.cache
def _function(name: str, gradient: torch.dtype = torch.float32, weight: torch.dtype = torch.float32) -> Any:
    file = "adamw.cpp" if "adamw" in name else "moments.cpp"
    defined = {"INPUT": shared.NAMES[gradient], "RESULT": shared.NAMES[weight]}
    return cpp_library.function(file, defined, name, _ARGUMENTS[name], _INT)


MOMENTS = Compiled("storing moments", lambda: _function(_ENCODE), ())
"""For any tensors: its functions look at each."""
ADAMW = Compiled(
    "a step of AdamW",
    lambda weight, gradient: _function("te_adamw_float8", gradient, weight),
    shared.DTYPES,
)
"""Its key: the dtype of the weight, then the dtype of its gradient."""


def updates(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor]) -> bool:
    """Whether `adamw_step` updates these here and now: what it reads and writes, none of it in the same memory."""
    if weight.dtype is gradient.dtype is moments[0].dtype is torch.float32:
        return False  # which torch's kernel updates as they are
    if choose(ADAMW, weight, weight.dtype, gradient.dtype) is not Backend.COMPILED:
        return False
    description: Takes = _FLOAT8 if len(moments) == 4 else _PLAIN
    return not description.misfit_on_cpu(weight, gradient, *moments)


def available(*tensors: Tensor) -> bool:
    """Whether these are contiguous tensors on CPU, in eager code, and there is a library."""
    return not compiling() and all(t.is_cpu and t.is_contiguous() for t in tensors) and has_library(MOMENTS)


def encode_moments(
    first: Tensor,
    second: Tensor,
    key: Tensor,
    step: Tensor,
    begin: Tensor,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...] | None:
    """Return both moments, float32 [n] each, as (data [blocks, 128] E4M3, scale_inv [blocks]) twice; None for a NaN,
    and for what the library does not take.

    key, step, begin: see `hashed_bits`, whose low 16 bits round the first moment, and whose high ones the second. out:
    contiguous tensors of these sizes to write to; their values are undefined after a NaN.
    """
    if _BOTH.misfit_on_cpu(first, second):
        return None
    blocks = -(-first.numel() // BLOCK)
    if out is None:
        data = [torch.empty((blocks, BLOCK), dtype=torch.float8_e4m3fn, device="cpu") for _ in range(2)]
        scales = [torch.empty(blocks, dtype=torch.float32, device="cpu") for _ in range(2)]
        out = data[0], scales[0], data[1], scales[1]
    elif [t.numel() for t in out] != [blocks * BLOCK, blocks] * 2:
        raise ValueError(f"out has {[t.numel() for t in out]} elements; allowed: {[blocks * BLOCK, blocks] * 2}")
    elif not _writes(out, (first, second), [torch.float8_e4m3fn, torch.float32] * 2):
        return None
    k0, k1 = hash_words(key, step).tolist()
    pointers = [t.data_ptr() for t in (first, second, *out)]
    run = _function(_ENCODE)
    if run(*pointers, first.numel(), k0, k1, int(begin), threads_for(first.numel())):
        return None
    return tuple(out)


def round_moments(
    first: Tensor, second: Tensor, key: Tensor, step: Tensor, begin: Tensor, out: Sequence[Tensor]
) -> bool:
    """Round both moments, float32 [n] each, to contiguous bfloat16 tensors of n elements, with the bits that
    `encode_moments` uses. Return whether it is done: not for a NaN, after which the values of `out` are undefined."""
    if [(t.numel(), t.dtype) for t in out] != [(first.numel(), torch.bfloat16)] * 2:
        raise ValueError(f"out is {[(t.numel(), t.dtype) for t in out]}; allowed: bfloat16, {first.numel()} each")
    if _BOTH.misfit_on_cpu(first, second) or not _writes(out, (first, second), [torch.bfloat16] * 2):
        return False
    k0, k1 = hash_words(key, step).tolist()
    pointers = [t.data_ptr() for t in (first, second, *out)]
    run = _function("te_round_moments")
    return not run(*pointers, first.numel(), k0, k1, int(begin), threads_for(first.numel()))


def decode_moments(
    first: Tensor, first_scale_inv: Tensor, second: Tensor, second_scale_inv: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Return both moments in float32 from what `encode_moments` returned: of this shape, of n elements; None
    for what it did not."""
    if _STORED.misfit_on_cpu(first, first_scale_inv, second, second_scale_inv, -(-math.prod(shape) // BLOCK)):
        return None
    out = first.new_empty(tuple(shape), dtype=torch.float32), first.new_empty(tuple(shape), dtype=torch.float32)
    stored = first, first_scale_inv, second, second_scale_inv
    pointers = [t.data_ptr() for t in (*stored, *out)]
    _function("te_decode_moments")(*pointers, out[0].numel(), threads_for(out[0].numel()))
    return out


class Hyperparameters(NamedTuple):
    """AdamW's, of one step; t: its number, the first being 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    t: float


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    key: Tensor,
    step: Tensor,
    hyperparameters: Hyperparameters,
) -> Tensor | None:
    """Update a weight and its moments in place, in one pass, to the bits of reading them, torch's fused AdamW on
    float32 copies, and rounding them. Return which blocks of 128 were left as they are, bool [blocks], for a NaN in
    their moments; None if it cannot be compiled.

    weight, gradient: float32 or bfloat16, [n]; moments: as `encode_moments` returns them, or two of bfloat16 or
    float32, [n]; what `updates` says. key, step: as there.
    """
    h = hyperparameters
    lerp, root_correction = 1 - h.beta1, math.sqrt(1 - h.beta2**h.t)
    scalars = torch.tensor(
        [
            1 - h.lr * h.weight_decay,
            lerp,
            abs(lerp) >= 0.5,
            h.beta2,
            1 - h.beta2,
            root_correction,
            h.eps,
            -h.lr / (1 - h.beta1**h.t),
        ],
        dtype=torch.float32,
        device="cpu",
    )
    n = weight.numel()
    name = "float8" if len(moments) == 4 else str(moments[0].dtype).removeprefix("torch.")
    run = _function(f"te_adamw_{name}", gradient.dtype, weight.dtype)
    arguments = [*(t.data_ptr() for t in (weight, gradient, *moments)), n, scalars.data_ptr()]
    if name == "float32":  # of which nothing is rounded
        run(*arguments, threads_for(n))
        return None
    left = torch.empty(-(-n // BLOCK), dtype=torch.bool, device="cpu")
    k0, k1 = hash_words(key, step).tolist()
    found = run(*arguments, k0, k1, left.data_ptr(), threads_for(n))
    return left if found else None
