"""The compiled library of moments in few bits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import cpp_library
from ..cpu_fields.source import E4M3
from ..cpu_graph import library as shared
from ..cpu_graph import source as rounding
from ..hashed import hash_words
from .source import MOMENTS

BLOCK = 128
_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "te_encode_moments": (*(_P,) * 6, _N, *(ctypes.c_int32,) * 3, _INT),
    "te_round_moments": (*(_P,) * 4, _N, *(ctypes.c_int32,) * 3, _INT),
    "te_decode_moments": (*(_P,) * 6, _N, _INT),
}


@functools.cache
def _function(name: str) -> Any:
    code = rounding.NUMBERS + rounding.FP8_SCALE + E4M3 + MOMENTS
    defined = {"INPUT": "Float32", "RESULT": "Float32"}
    return cpp_library.function(code, defined, name, _ARGUMENTS[name], _INT)


def _trial() -> None:
    _function("te_encode_moments")


def available(*tensors: Tensor) -> bool:
    """Whether these are contiguous tensors on CPU, and the library can be compiled; counts why not
    (`cpu_graph.library.fallbacks`)."""
    return all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and shared.available(_trial)


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
        data = [torch.empty((blocks, BLOCK), dtype=torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.empty(blocks, dtype=torch.float32) for _ in range(2)]
        out = data[0], scales[0], data[1], scales[1]
    elif [t.numel() for t in out] != [blocks * BLOCK, blocks] * 2:
        raise ValueError(f"out has {[t.numel() for t in out]} elements; allowed: {[blocks * BLOCK, blocks] * 2}")
    k0, k1 = hash_words(key, step).tolist()
    pointers = [t.data_ptr() for t in (first, second, *out)]
    run = _function("te_encode_moments")
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
    out = torch.empty(tuple(shape), dtype=torch.float32), torch.empty(tuple(shape), dtype=torch.float32)
    stored = first, first_scale_inv, second, second_scale_inv
    pointers = [t.data_ptr() for t in (*stored, *out)]
    _function("te_decode_moments")(*pointers, out[0].numel(), torch.get_num_threads())
    return out
