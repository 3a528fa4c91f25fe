"""Attention of one query of each head to cached keys on a CPU, eagerly, where no gradient is wanted.

A token that is decoded reads all keys and values once. torch's kernel, made for many queries, takes two to four times
as long as memory does; here they are read front to back, whatever the number of heads that share them.

B batch, L keys, N query heads, G key/value heads, D channels of q and k, Dv channels of v.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .. import cpp_library
from ..backend import Backend, Compiled, choose
from ..compiling import compiling
from ..custom_op import takes
from ..gemm.gemv import without_instructions
from ..quantize.cpu import rounding as shared
from ..quantize.eager import plain_on_cpu
from ..threads import threads_for

LEAST = 2**13
"""Elements of the keys from which reading them is what takes the time."""
MOST_SHARED = 8
"""Queries of a key head: of more, a matrix product is faster than reading the keys once is worth."""
_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = (_P, *((_P, _N, _N, _N) * 2), _P, _N, _P, *(_N,) * 6, _FLOAT, _INT)


@functools.cache
def _function(dtype: torch.dtype, narrow: bool = False) -> Any:
    """Return the function for a dtype. narrow: with AVX2 alone."""
    defined = {"INPUT": shared.NAMES[dtype]} | ({"NARROW": ""} if narrow else {})
    return cpp_library.function("decode_attention.cpp", defined, "te_attend_one", _ARGUMENTS)


DECODING = Compiled("attention of a token", lambda dtype: _function(dtype), shared.DTYPES, against=without_instructions)


_TAKES = takes(
    "query: T [B, N, 1, D]; key: T [B, G, L, D] rows; value: T [B, G, L, Dv] rows; visible: bool [_, 1, 1, L]?;"
    "D % 16 == 0 and Dv % 16 == 0;"  # of AVX-512's vectors
    "N % G == 0 if G else False;"
    "visible is None or visible.shape[0] in (1, B)",
    T=shared.DTYPES,
)


def uses_decode_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, least: int | None = None
) -> bool:
    """Whether `attend_one` attends: plain tensors of one dtype on CPU, one query of each head, and no more of a mask
    than which keys are visible. query: [B, N, 1, D]; key: [B, G, L, D]; value: [B, G, L, Dv]; visible: None, or a
    tensor broadcastable to [B, N, 1, L]. least: in place of LEAST."""
    if query.dim() != 4 or query.shape[2] != 1 or key.numel() < (LEAST if least is None else least) or compiling():
        return False
    if _TAKES.misfit_on_cpu(query, key, value, visible) or query.shape[1] > MOST_SHARED * key.shape[1]:
        return False
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != query.dtype:
        return False  # torch's attention is of another dtype there
    return plain_on_cpu(key) and plain_on_cpu(value) and choose(DECODING, query) is Backend.COMPILED


def attend_one(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Return attention of query [B, N, 1, D] over key [B, G, L, D] and value [B, G, L, Dv], where it
    `uses_decode_attention`: [B, N, 1, Dv]. A query that sees no key gets zeros."""
    batch, heads, _, channels = query.shape
    groups, keys, width = key.shape[1], key.shape[2], value.shape[3]
    query = query.contiguous()
    out = torch.empty((batch, heads, 1, width), dtype=query.dtype, device="cpu")
    visible = None if visible is None else visible.contiguous()
    _function(query.dtype)(
        query.data_ptr(),
        key.data_ptr(),
        *(key.stride(i) for i in (0, 2, 1)),
        value.data_ptr(),
        *(value.stride(i) for i in (0, 2, 1)),
        None if visible is None else visible.data_ptr(),
        0 if visible is None or visible.shape[0] == 1 else keys,
        out.data_ptr(),
        batch,
        keys,
        groups,
        heads // groups,
        channels,
        width,
        scale,
        threads_for((key.numel() + value.numel()) * (heads // groups) * 0.2),
    )
    return out
