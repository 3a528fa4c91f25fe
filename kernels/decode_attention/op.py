"""Attention of one query of each head to cached keys on a CPU, in eager code or a graph, where no gradient is wanted.

A token that is decoded reads the keys and values that it sees once. torch's kernel, made for many queries, takes two to
four times as long as memory does; here they are read front to back, whatever the number of heads that share them. Slots
of a cache that hold nothing yet are not read.

B batch, L keys, N query heads, G key/value heads, D channels of q and k, Dv channels of v.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import cpp_library
from ..backend import PLAIN, Backend, Compiled, choose
from ..compiling import compiling
from ..custom_op import like, operation, takes
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


DECODING = Compiled(
    "attention of a token",
    lambda dtype: _function(dtype),
    shared.DTYPES,
    against=without_instructions,
    in_graphs="if there",
)

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
    than which keys are visible; in a graph for a number of keys that is no variable. query: [B, N, 1, D]; key: [B, G,
    L, D]; value: [B, G, L, Dv]; visible: None, or a tensor broadcastable to [B, N, 1, L]. least: in place of LEAST."""
    if query.dim() != 4 or query.shape[2] != 1:
        return False
    least = LEAST if least is None else least
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != query.dtype:
        return False  # torch's attention is of another dtype there
    if torch.compiler.is_compiling() and compiling():
        return _in_graph(query, key, value, visible, least)
    if key.numel() < least or _TAKES.misfit_on_cpu(query, key, value, visible):
        return False
    if query.shape[1] > MOST_SHARED * key.shape[1]:
        return False
    return plain_on_cpu(key) and plain_on_cpu(value) and choose(DECODING, query) is Backend.COMPILED


def _in_graph(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, least: int) -> bool:
    if any(type(x) not in PLAIN or (x.requires_grad and torch.is_grad_enabled()) for x in (query, key, value)):
        return False
    if not statically_known_true(key.numel() >= least) or _TAKES.misfit(query, key, value, visible):
        return False
    return query.shape[1] <= MOST_SHARED * key.shape[1] and choose(DECODING, query) is Backend.OPERATION


def attend_one(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Return attention of query [B, N, 1, D] over key [B, G, L, D] and value [B, G, L, Dv], where it
    `uses_decode_attention`: [B, N, 1, Dv]. A query that sees no key gets zeros."""
    call = decode_attention_fwd if torch.compiler.is_compiling() and compiling() else _attend
    return call(query, key, value, visible, scale)


@operation("decode_attention", lambda query, value: like(query, (*query.shape[:3], value.shape[3])), takes=_TAKES)
def decode_attention_fwd(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """As `attend_one`."""
    return _attend(query, key, value, visible, scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
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
