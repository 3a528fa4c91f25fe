"""Attention within documents on a CPU: one call of torch's flash attention for each document.

A mask of a row of S tokens has S^2 entries, and attention under it computes S^2 scores, of which documents of length n
use S n. Here the boundaries are data: a registered operation reads them, so that one graph serves all of them.
FlexAttention, torch's way to say this with a mask function, has no backward pass on a CPU.

B batch, S sequence, N query heads, G key/value heads, D channels of q and k, Dv channels of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import Output, gradient_of, like, operation
from ..gemm.cpu import in_float32

__all__ = ["documents_of_lengths", "packed_attention", "packed_attention_bwd", "packed_attention_fwd"]


def _results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Output, Output]:
    return like(q, (*q.shape[:-1], v.shape[-1])), like(q, q.shape[:-1], torch.float32)


@operation("packed_attention_fwd", _results)
def packed_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention [B, N, S, Dv] and the log of the sum of exponentials of each query's scores, float32 [B, N, S].

    q: [B, N, S, D]; k: [B, G, S, D]; v: [B, G, S, Dv]; documents: int64 [B, S], see `packed_attention`. Differentiable
    once in q, k and v.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    logsumexp = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    for part in _parts(documents):
        arguments = _flash_arguments(q[part], k[part], v[part])
        found, own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *arguments, 0.0, causal, attn_mask=None, scale=scale
        )
        out[part] = found[..., : v.shape[-1]]
        logsumexp[part] = own
    return out, logsumexp


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Output, Output, Output]:
    return like(q), like(k), like(v)


@operation("packed_attention_bwd", _gradients)
def packed_attention_bwd(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `packed_attention_fwd`, from its results. grad: [B, N, S, Dv]."""
    gradients = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for part in _parts(documents):
        query, key, value = _flash_arguments(q[part], k[part], v[part])
        outer, own = (_wide(x[part], query) for x in (grad, out))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            outer, query, key, value, own, logsumexp[part], 0.0, causal, attn_mask=None, scale=scale
        )
        for whole, gradient in zip(gradients, found, strict=True):
            heads, channels = whole.shape[1], whole.shape[-1]
            gradient = gradient[..., :channels]
            if heads != gradient.shape[1]:  # of a key head, over the query heads that share it
                gradient = gradient.unflatten(1, (heads, -1)).sum(2)
            whole[part] = gradient
    return gradients  # type: ignore[return-value]


@gradient_of(
    packed_attention_fwd,
    saves=("q", "k", "v", "documents", "scale", "causal"),
    saves_results=(0, 1),
    constant=(1,),
)
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    flags = (saved.documents, saved.scale, saved.causal)
    dq, dk, dv = packed_attention_bwd(grad, saved.q, saved.k, saved.v, *saved.results, *flags)
    return {"q": dq, "k": dk, "v": dv}


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, *, scale: float, causal: bool = True
) -> Tensor:
    """Return softmax attention within documents, [B, N, S, Dv]. On a CPU only; memory is linear in S.

    q: [B, N, S, D]; k: [B, G, S, D]; v: [B, G, S, Dv], one dtype. documents: int64 [B, S], a number for each token;
    neighbours of the same number are a document, and a negative number is padding, which gets zeros and no gradient.
    causal: a token sees those of its document up to itself. Differentiable once in q, k and v. Raises ValueError for
    another device and for documents of another shape.
    """
    if q.device.type != "cpu":
        raise ValueError(f"the queries are on {q.device.type}; allowed: cpu")
    if documents.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"documents has shape {tuple(documents.shape)}; allowed: {(q.shape[0], q.shape[2])}")
    return packed_attention_fwd(q, k, v, documents, scale, causal)[0]


def documents_of_lengths(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the document numbers, int64 [1, tokens], of sequences whose lengths have the sums cu_seqlens [B + 1];
    -1 behind the last one."""
    place = torch.arange(tokens, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, place.to(cu_seqlens.dtype), right=True) - 1
    return torch.where(place < cu_seqlens[-1], number, -1)[None]


def sees_own_document(documents: Tensor) -> Tensor:
    """documents: [B, S], negative for padding -> [B, S, S] bool, true where a token may see another; padding sees
    nothing, itself neither. The mask where `packed_attention` does not serve."""
    return (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]


def _parts(documents: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield where each document lies in [B, heads, S]: its row, all heads, its tokens."""
    for row, numbers in enumerate(documents):
        values, counts = torch.unique_consecutive(numbers, return_counts=True)
        begin = 0
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            if value >= 0:
                yield slice(row, row + 1), slice(None), slice(begin, begin + count)
            begin += count


def _flash_arguments(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as torch's flash attention takes them: as many heads of each, as many channels, and in float32 on
    a machine whose GEMM is faster there. Channels that are zero change no score and no result."""
    shared, channels = q.shape[1] // k.shape[1], max(q.shape[-1], v.shape[-1])
    wide = q.float() if in_float32(q) else q
    wide = F.pad(wide, (0, channels - wide.shape[-1]))
    key, value = (_wide(x.repeat_interleave(shared, 1) if shared > 1 else x, wide) for x in (k, v))
    return wide, key, value


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the dtype, and with the channels, of `like`."""
    return F.pad(x.to(like.dtype), (0, like.shape[-1] - x.shape[-1]))
