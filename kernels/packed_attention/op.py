"""Attention within documents on a CPU: one call of our flash attention for each document, or where that is not for the
shapes, of torch's, or with soft-capped scores, a feature that torch's lacks, one block of queries after the other
(`softcap`).

A mask of a row of S tokens has S^2 entries, and attention under it computes S^2 scores, of which documents of length n
use S n. Here the boundaries are data: a registered operation reads them, so that one graph serves all of them.
FlexAttention, torch's way to say this with a mask function, has no backward pass on a CPU.

Queries may cover the last positions only. With torch's kernel a document that began before them is attended to
in two calls, to the keys before the queries and, causally, to those beside them; the logs of their sums of exponentials
say how much each part counts. The backward pass of either part needs the joint result and sum alone.

A sink, one more logit for each head that takes probability and adds nothing (gpt_oss), is one more part of the sum of
exponentials: with the joint sum the result shrinks, and the backward pass is the same.

B batch, S sequence, Q queries, N query heads, G key/value heads, D channels of q and k, Dv channels of v.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import has_library
from ..chunks import wide
from ..custom_op import Output, like, operation, register_gradient
from ..flash_attention import ATTENTION, BACKWARD, attention_backward, attention_forward, fits
from ..gemm.cpu import in_float32
from .softcap import softcapped_bwd, softcapped_fwd


def _results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Output, Output]:
    return like(q, (*q.shape[:-1], v.shape[-1])), like(q, q.shape[:-1], wide(q))


@operation("packed_attention_fwd", _results)
def packed_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    scale: float,
    causal: bool,
    sink: Tensor | None,
    softcap: float = 0.0,
    window: int = -1,
) -> tuple[Tensor, Tensor]:
    """Return attention [B, N, Q, Dv] and the log of the sum of exponentials of each query's scores, and of the sink,
    [B, N, Q], float32 (float64 of float64).

    q: [B, N, Q, D]; k: [B, G, S, D]; v: [B, G, S, Dv]; documents: int64 [B, S], see `packed_attention`; sink: [N];
    softcap: 0 turns it off; window: -1 turns it off. Differentiable once in q, k, v and sink.
    """
    logit = None if sink is None else sink.to(wide(q))[None, :, None]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    logsumexp = q.new_zeros(q.shape[:-1], dtype=wide(q))
    ours = window >= 0 or _has_ours(q, k, v, scale, gradients=False)
    for queries, parts in _documents(documents, q.shape[2], causal):
        keys = _together(parts)
        if ours:
            found, own = out[queries], logsumexp[queries]
            flipped = [x.transpose(1, 2) for x in (q[queries], k[keys], v[keys], found, own)]
            attention_forward(*flipped, scale=scale, causal=causal, window=window + 1, softcap=softcap)
            if logit is None:
                continue
        elif softcap:
            found, own = softcapped_fwd(q[queries][0], k[keys][0], v[keys][0], scale, causal, softcap)
        else:
            each = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *_flash_arguments(q[queries], k[keys], v[keys]), 0.0, is_causal, attn_mask=None, scale=scale
                )
                for keys, is_causal in parts
            )
            found, own = functools.reduce(_joined, each)
            found = found[..., : v.shape[-1]]
        if logit is not None:
            both = torch.logaddexp(own, logit)
            found, own = found.to(both.dtype) * (own - both).exp()[..., None], both
        out[queries] = found.to(out.dtype)
        logsumexp[queries] = own
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
    softcap: float = 0.0,
    window: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `packed_attention_fwd`, from its results. grad: [B, N, Q, Dv]."""
    gradients = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    ours = window >= 0 or _has_ours(q, k, v, scale, gradients=True)
    for queries, parts in _documents(documents, q.shape[2], causal):
        keys = _together(parts)
        if ours:
            places = (queries, queries, keys, keys, queries, queries)
            flipped = [
                x[place].transpose(1, 2) for x, place in zip((grad, q, k, v, out, logsumexp), places, strict=True)
            ]
            into = (x[place].transpose(1, 2) for x, place in zip(gradients, (queries, keys, keys), strict=True))
            attention_backward(
                *flipped, into=tuple(into), scale=scale, causal=causal, window=window + 1, softcap=softcap
            )
            continue
        if softcap:
            own = grad[queries][0], q[queries][0], k[keys][0], v[keys][0], out[queries][0], logsumexp[queries][0]
            for whole, place, gradient in zip(
                gradients, (queries, keys, keys), softcapped_bwd(*own, scale, causal, softcap), strict=True
            ):
                whole[place] = gradient
            continue
        of_queries: list[Tensor] = []
        for keys, is_causal in parts:
            query, key, value = _flash_arguments(q[queries], k[keys], v[keys])
            outer, result = (_wide(x[queries], query) for x in (grad, out))
            dq, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                outer, query, key, value, result, logsumexp[queries], 0.0, is_causal, attn_mask=None, scale=scale
            )
            of_queries.append(dq)
            for whole, gradient in zip(gradients[1:], others, strict=True):
                heads, channels = whole.shape[1], whole.shape[-1]
                gradient = gradient[..., :channels]
                if heads != gradient.shape[1]:  # of a key head, over the query heads that share it
                    gradient = gradient.unflatten(1, (heads, -1)).sum(2)
                whole[keys] = gradient
        gradients[0][queries] = functools.reduce(torch.add, of_queries)[..., : q.shape[-1]]
    return gradients  # type: ignore[return-value]


@register_gradient(
    packed_attention_fwd,
    saves=("q", "k", "v", "documents", "scale", "causal", "sink", "softcap", "window"),
    saves_results=(0, 1),
    constant=(1,),
)
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    flags = (saved.documents, saved.scale, saved.causal, saved.softcap, saved.window)
    out, logsumexp = saved.results
    dq, dk, dv = packed_attention_bwd(grad, saved.q, saved.k, saved.v, out, logsumexp, *flags)
    found = {"q": dq, "k": dk, "v": dv}
    if saved.sink is not None and "sink" in needs:
        dtype = logsumexp.dtype
        share = (saved.sink.to(dtype)[None, :, None] - logsumexp).exp()  # of padding it counts with a result of zero
        found["sink"] = -(share * (grad.to(dtype) * out.to(dtype)).sum(-1)).sum((0, 2)).to(saved.sink.dtype)
    return found


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sink: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return softmax attention within documents, [B, N, Q, Dv]. On a CPU only; memory is linear in S.

    q: [B, N, Q, D], of the last Q of S positions; k: [B, G, S, D]; v: [B, G, S, Dv], one dtype. documents: int64
    [B, S], a number for each token; neighbours of the same number are a document, and a negative number is padding: it
    gets zeros and no gradient. causal: a token sees the tokens of its document up to itself. sink: [N], a logit of each
    head that takes probability and adds nothing. softcap: scores become `softcap * tanh(score / softcap)`.
    window: how many positions before itself a token sees; None: all; a number only with causal attention that our flash
    attention serves. Differentiable once in q, k, v and sink. Raises ValueError for another device, for documents of
    another shape, for more queries than keys, and for a window that is negative, without causal, or of tensors that
    flash attention does not serve.
    """
    if q.device.type != "cpu":
        raise ValueError(f"the queries are on {q.device.type}; allowed: cpu")
    if window is not None and not (causal and window >= 0):
        raise ValueError(f"window is {window} and causal {causal}; allowed: None, or 0 and more where causal is True")
    if window is not None and not fits(q, k, v, scale):
        shapes = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"flash attention does not serve {shapes}; allowed with a window: what it serves")
    check_documents(q, k, documents)
    before = -1 if window is None else window
    return packed_attention_fwd(q, k, v, documents, scale, causal, sink, softcap or 0.0, before)[0]


def check_documents(q: Tensor, k: Tensor, documents: Tensor) -> None:
    """Raise ValueError for documents of another shape than the keys', and for more queries than keys."""
    if documents.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"documents has shape {tuple(documents.shape)}; allowed: {(k.shape[0], k.shape[2])}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"there are {q.shape[2]} queries; allowed: up to {k.shape[2]}, as there are keys")


Place = tuple[slice, slice, slice]
"""Where tokens lie in [B, heads, S]: their row, all heads, their positions."""


def _documents(documents: Tensor, count: int, causal: bool) -> Iterator[tuple[Place, list[tuple[Place, bool]]]]:
    """Yield where the queries of each document lie among the last `count` positions, and where its keys lie: in
    parts that flash attention takes, whose causal mask begins with the first key and the first query, each with whether
    it is to use that."""
    first = documents.shape[1] - count  # the position of the first of all queries
    for row, numbers in enumerate(documents):
        values, counts = torch.unique_consecutive(numbers, return_counts=True)

        def place(begin: int, end: int, row: int = row) -> Place:
            return slice(row, row + 1), slice(None), slice(begin, end)

        begin = 0
        for value, length in zip(values.tolist(), counts.tolist(), strict=True):
            end, own = begin + length, max(begin, first)
            if value >= 0 and end > first:
                parts = [(place(begin, end), causal)]
                if causal and own > begin:
                    parts = [(place(begin, own), False), (place(own, end), True)]
                yield place(own - first, end - first), parts
            begin = end


def _has_ours(q: Tensor, k: Tensor, v: Tensor, scale: float, *, gradients: bool) -> bool:
    """Whether our flash attention takes these; queries may belong to the last of the keys."""
    return fits(q, k, v, scale) and has_library(ATTENTION, q.dtype, *[BACKWARD] * gradients)


def _together(parts: list[tuple[Place, bool]]) -> Place:
    """Return where the keys of all parts lie."""
    (row, heads, first), (*_, last) = parts[0][0], parts[-1][0]
    return row, heads, slice(first.start, last.stop)


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention to two parts of the keys as attention to both, with the log of the sum of exponentials."""
    both = torch.logaddexp(one[1], other[1])
    parts = (out.to(both.dtype) * (own - both).exp()[..., None] for out, own in (one, other))
    return sum(parts).to(one[0].dtype), both  # type: ignore[union-attr]


def _flash_arguments(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as torch's flash attention takes them: as many heads of each, as many channels, and in float32 on
    a machine whose GEMM is faster there. Channels that are zero change no score and no result."""
    shared, channels = q.shape[1] // k.shape[1], max(q.shape[-1], v.shape[-1])
    query = q.float() if in_float32(q) else q
    query = F.pad(query, (0, channels - query.shape[-1]))
    key, value = (_wide(x.repeat_interleave(shared, 1) if shared > 1 else x, query) for x in (k, v))
    return query, key, value


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the dtype, and with the channels, of `like`."""
    return F.pad(x.to(like.dtype), (0, like.shape[-1] - x.shape[-1]))
