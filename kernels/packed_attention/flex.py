"""Attention within documents on a GPU: torch's FlexAttention, whose kernels are generated for a mask function.

What a query sees of packed documents, causal or not and in a window or not, is one interval of positions. So the mask
function compares a key's position with two numbers of its query, and which blocks of keys a block of queries looks at
follows from the least and the greatest of those: tables of (S / 128)^2 entries, not a mask of S^2.

FlexAttention fuses its kernel only inside a compiled graph. Code that is not compiled calls a function that is: one
for each set of options. Torch's limit of recompilations is an error there and not a slow unfused call.

B batch, S keys, Q queries, of the last positions; N query heads, G key/value heads, D channels of q and k, Dv of v.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..custom_op import Output, like, operation
from ..documents import begins_of, first_positions
from .op import check_documents

BLOCK = 128
"""Positions of a block of queries, and of keys: what FlexAttention's kernels are made for."""


class _Options(NamedTuple):
    """See `flex_packed_attention`; each set of them is a kernel."""

    scale: float
    causal: bool
    window: int
    softcap: float | None


def flex_packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax attention within documents, [B, N, Q, Dv], differentiable in q, k, v and sink.

    q, k, v, documents, causal, sink: as for `packed_attention`. window: how many positions before a query it sees
    beside its own; None: all. softcap: scores become `softcap * tanh(score / softcap)`. ValueError as there, but for
    another device.
    """
    check_documents(q, k, documents)
    options = _Options(scale, causal, -1 if window is None else window, softcap)
    if torch.compiler.is_compiling():
        return _attend(q, k, v, documents, sink, options)
    return _compiled(options)(q, k, v, documents, sink)


@functools.cache
def _compiled(options: _Options) -> Callable[..., Tensor]:
    """Return `_attend` with these options, compiled.

    The compiler counts recompilations, and notes which numbers change between them, by code object: so each set of
    options gets a separate code object, in which a softcap is a constant of the kernel.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sink: Tensor | None) -> Tensor:
        return _attend(q, k, v, documents, sink, options)

    code = attend.__code__.replace(co_name=f"attend_{_compiled.cache_info().misses}")
    own = FunctionType(code, attend.__globals__, closure=attend.__closure__)
    return torch.compile(own, fullgraph=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, sink: Tensor | None, options: _Options) -> Tensor:
    lower, upper = seen_intervals(documents, q.shape[2], options.causal, options.window)
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=None if options.softcap is None else functools.partial(_capped, options.softcap),
        block_mask=block_mask_of(lower, upper, k.shape[2]),
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=sink is not None),
    )
    if sink is None:
        return out
    # one more logit takes exp(sink) / (exp(sink) + the sum of exponentials) of the probability
    assert aux.lse is not None, "asked for"
    rest = torch.sigmoid(aux.lse - sink.float()[None, :, None])
    return (out.float() * rest[..., None]).to(out.dtype)


def _capped(softcap: float, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return softcap * torch.tanh(score / softcap)


def _intervals(documents: Tensor, queries: int) -> tuple[Output, Output]:
    both = like(documents, (documents.shape[0], queries), torch.int32)
    return both, both


@operation("packed_attention_intervals", _intervals)
def seen_intervals(documents: Tensor, queries: int, causal: bool, window: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last position that each of the last `queries` tokens sees, int32 [B, Q] both.

    documents: int64 [B, S]; neighbours of the same number are a document. A token of padding (a negative number) sees
    none: its first position is S, its last one -1. window: how many positions before its own a token sees; -1: all.
    An operation, because FlexAttention's kernel reads tensors, and not what the compiler would fuse into it.
    """
    rows, length = documents.shape
    position = torch.arange(length, device=documents.device).expand(rows, length)
    lower = first_positions(documents)
    if window >= 0:
        lower = torch.maximum(lower, position - window)
    upper = position
    if not causal:
        ends = F.pad(begins_of(documents)[:, 1:], (0, 1), value=True)
        upper = torch.where(ends, position, length).flip(1).cummin(1).values.flip(1)
    lower, upper = torch.where(documents < 0, length, lower), torch.where(documents < 0, -1, upper)
    return tuple(x[:, length - queries :].to(torch.int32).contiguous() for x in (lower, upper))  # type: ignore[return-value]


def block_mask_of(lower: Tensor, upper: Tensor, keys: int) -> BlockMask:
    """Return FlexAttention's mask of queries that see the positions from `lower` to `upper`, int32 [B, Q], over `keys`
    keys: of each block of queries the blocks of keys that all its queries see whole, and those that some see."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (lower[batch, query] <= key) & (key <= upper[batch, query])

    queries = lower.shape[1]
    behind = (0, -queries % BLOCK)  # rows that see nothing fill the last block
    low, high = F.pad(lower, behind, value=keys).unflatten(1, (-1, BLOCK)), F.pad(upper, behind, value=-1)
    high = high.unflatten(1, (-1, BLOCK))
    begin = torch.arange(0, keys, BLOCK, device=lower.device, dtype=torch.int32)
    end = begin + BLOCK - 1
    some = (begin + BLOCK > low.amin(2, keepdim=True)) & (begin <= high.amax(2, keepdim=True))
    whole = (begin >= low.amax(2, keepdim=True)) & (end <= high.amin(2, keepdim=True))
    return BlockMask.from_kv_blocks(
        *_table(some & ~whole),
        *_table(whole),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
        seq_lengths=(queries, keys),
    )


def _table(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are chosen, int32 [B, 1, blocks], and their numbers, followed by the numbers of
    the other blocks, int32 [B, 1, blocks, blocks of keys]. chosen: bool [B, blocks, blocks of keys]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
