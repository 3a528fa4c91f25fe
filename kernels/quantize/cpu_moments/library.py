"""The compiled library of moments in few bits, and of AdamW's steps on them."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import cpp_library
from ..cpu_fields.source import E4M3
from ..cpu_graph import library as shared
from ..cpu_graph.fp8_source import FP8_SCALE
from ..cpu_graph.source import NUMBERS
from ..hashed import hash_words
from .adamw_source import ADAMW
from .source import MOMENTS

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


@functools.cache
def _function(name: str, gradient: torch.dtype = torch.float32, weight: torch.dtype = torch.float32) -> Any:
    code = NUMBERS + FP8_SCALE + E4M3 + MOMENTS + (ADAMW if "adamw" in name else "")
    defined = {"INPUT": shared.NAMES[gradient], "RESULT": shared.NAMES[weight]}
    return cpp_library.function(code, defined, name, _ARGUMENTS[name], _INT)


def available(*tensors: Tensor) -> bool:
    """Whether these are contiguous tensors on CPU, and the library can be compiled; counts why not
    (`cpu_graph.library.fallbacks`)."""
    return all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and shared.available(_function, _ENCODE)


def worthwhile(elements: int, dtype: torch.dtype) -> bool:
    """Whether eager code is to call the library for so many elements: see `cpu_graph.library.worthwhile`."""
    return shared.worthwhile(elements, dtype, _function, _ENCODE)


def updates(weight: torch.dtype, gradient: torch.dtype) -> bool:
    """Whether the library that updates weights of one dtype with gradients of another can be compiled and loaded."""
    return shared.available(_function, "te_adamw_float8", gradient, weight)


def encode_moments(
    first: Tensor,
    second: Tensor,
    key: Tensor,
    step: Tensor,
    begin: Tensor,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...] | None:
    """Return both moments, float32 [n] each, as (data [blocks, 128] E4M3, scale_inv [blocks]) twice; None for a NaN.

    key, step, begin: see `hashed_bits`, whose low 16 bits round the first moment, and whose high ones the second. out:
    contiguous tensors of these sizes to write to; their values are undefined after a NaN.
    """
    blocks = -(-first.numel() // BLOCK)
    if out is None:
        data = [torch.empty((blocks, BLOCK), dtype=torch.float8_e4m3fn, device="cpu") for _ in range(2)]
        scales = [torch.empty(blocks, dtype=torch.float32, device="cpu") for _ in range(2)]
        out = data[0], scales[0], data[1], scales[1]
    elif [t.numel() for t in out] != [blocks * BLOCK, blocks] * 2:
        raise ValueError(f"out has {[t.numel() for t in out]} elements; allowed: {[blocks * BLOCK, blocks] * 2}")
    k0, k1 = hash_words(key, step).tolist()
    pointers = [t.data_ptr() for t in (first, second, *out)]
    run = _function(_ENCODE)
    if run(*pointers, first.numel(), k0, k1, int(begin), torch.get_num_threads()):
        return None
    return tuple(out)


def round_moments(
    first: Tensor, second: Tensor, key: Tensor, step: Tensor, begin: Tensor, out: Sequence[Tensor]
) -> bool:
    """Round both moments, float32 [n] each, to contiguous bfloat16 tensors of n elements, with the bits that
    `encode_moments` uses. Return whether it is done: not for a NaN, after which the values of `out` are undefined."""
    if [(t.numel(), t.dtype) for t in out] != [(first.numel(), torch.bfloat16)] * 2:
        raise ValueError(f"out is {[(t.numel(), t.dtype) for t in out]}; allowed: bfloat16, {first.numel()} each")
    k0, k1 = hash_words(key, step).tolist()
    pointers = [t.data_ptr() for t in (first, second, *out)]
    run = _function("te_round_moments")
    return not run(*pointers, first.numel(), k0, k1, int(begin), torch.get_num_threads())


def decode_moments(
    first: Tensor, first_scale_inv: Tensor, second: Tensor, second_scale_inv: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return both moments in float32 from what `encode_moments` returned: of this shape, of n elements."""
    out = first.new_empty(tuple(shape), dtype=torch.float32), first.new_empty(tuple(shape), dtype=torch.float32)
    stored = first, first_scale_inv, second, second_scale_inv
    pointers = [t.data_ptr() for t in (*stored, *out)]
    _function("te_decode_moments")(*pointers, out[0].numel(), torch.get_num_threads())
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
    their moments; None where there is none.

    weight, gradient: float32 or bfloat16, [n]; moments: as `encode_moments` returns them, or two of bfloat16 or
    float32, [n]; all contiguous. key, step: as there.
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
        run(*arguments, torch.get_num_threads())
        return None
    left = torch.empty(-(-n // BLOCK), dtype=torch.bool, device="cpu")
    k0, k1 = hash_words(key, step).tolist()
    found = run(*arguments, k0, k1, left.data_ptr(), torch.get_num_threads())
    return left if found else None
