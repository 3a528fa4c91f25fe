"""Softmax attention in which each query has its list of keys, as differentiable operations of eager code and of a
graph.

Scores exist for a block of queries, in either pass: what is kept for the backward pass is the log of the sum of their
exponentials.

B batch, S queries, L keys, K keys of a query, N query heads, G key/value heads, R = N / G, D channels of q and k, Dv
channels of v, C queries of a block.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..chunks import wide
from ..custom_op import Output, like, operation, register_gradient
from .blocks import Block, chosen_of, operand, query_blocks, widened


def block_probabilities(
    block: Block, q: Tensor, k: Tensor, hidden: Tensor, scale: float, logsumexp: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the probabilities of a block, [G, R, C, block.keys], zeros where a query sees nothing, and the log of the
    sums of exponentials, [G, R, C], computed unless given. q: [B, S, G, R, D] and k: [B, G, L, D], both as `operand`;
    hidden: bool [C, block.keys]."""
    own = q[block.row, block.begin : block.end].permute(1, 2, 0, 3)
    scores = widened(own.flatten(1, 2) @ k[block.row, :, : block.keys].mT).unflatten(1, own.shape[1:3])
    scores = scores.mul_(scale).masked_fill_(hidden, -torch.inf)
    if logsumexp is None:
        logsumexp = scores.logsumexp(-1)
    finite = logsumexp.clamp(min=torch.finfo(logsumexp.dtype).min)  # of nothing it is -inf, and stays apart from scores
    return scores.sub_(finite[..., None]).exp_(), logsumexp


def grouped_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q [B, S, N, D] and k [B, L, G, D] as `block_probabilities` takes them."""
    groups = k.shape[2]
    return operand(q).unflatten(2, (groups, q.shape[2] // groups)), operand(k).transpose(1, 2)


def _results(q: Tensor, v: Tensor) -> tuple[Output, Output]:
    return like(q, (*q.shape[:-1], v.shape[-1])), like(q, q.shape[:-1], wide(q))


@operation("sparse_attention_fwd", _results)
def sparse_attention_fwd(q: Tensor, k: Tensor, v: Tensor, choice: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention [B, S, N, Dv] and the log of the sum of exponentials of each query's scores, float32 [B, S, N].

    Arguments: see `sparse_attention`. Differentiable once in q, k and v.
    """
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    sums = q.new_empty(q.shape[:-1], dtype=wide(q))
    wide_q, wide_k = grouped_heads(q, k)
    value = operand(v).transpose(1, 2)
    for block in query_blocks(q, k.shape[1], q.shape[2]):
        p, logsumexp = block_probabilities(block, wide_q, wide_k, ~chosen_of(block, choice), scale)
        found = p.flatten(1, 2).to(value.dtype) @ value[block.row, :, : block.keys]
        out[block.row, block.begin : block.end] = _tokens_first(found.unflatten(1, p.shape[1:3])).to(out.dtype)
        sums[block.row, block.begin : block.end] = _tokens_first(logsumexp)
    return out, sums


def _tokens_first(x: Tensor) -> Tensor:
    """[G, R, C, ...] -> [C, G R, ...]."""
    return x.movedim(2, 0).flatten(1, 2)


def _heads_first(x: Tensor, block: Block, groups: int) -> Tensor:
    """[B, S, N, ...] -> a block's [G, R, C, ...]."""
    return x[block.row, block.begin : block.end].unflatten(1, (groups, -1)).movedim(0, 2)


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Output, Output, Output]:
    return like(q), like(k), like(v)


@operation("sparse_attention_bwd", _gradients)
def sparse_attention_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, choice: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `sparse_attention_fwd`, from its results. grad: [B, S, N, Dv]."""
    groups = k.shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide_q, wide_k = grouped_heads(q, k)
    value = operand(v).transpose(1, 2)
    dk, dv = (torch.zeros(x.shape, dtype=logsumexp.dtype, device=x.device) for x in (wide_k, value))
    for block in query_blocks(q, k.shape[1], q.shape[2]):
        seen = (block.row, slice(None), slice(block.keys))
        sums = _heads_first(logsumexp, block, groups)
        p, _ = block_probabilities(block, wide_q, wide_k, ~chosen_of(block, choice), scale, sums)
        outer = _heads_first(operand(grad), block, groups)
        rows, flat = outer.flatten(1, 2), p.flatten(1, 2)
        dv[seen] += widened(flat.mT.to(rows.dtype) @ rows)
        shift = (widened(outer) * widened(_heads_first(out, block, groups))).sum(-1).flatten(1, 2)
        ds = (flat * (widened(rows @ value[seen].mT) - shift[..., None]) * scale).to(wide_q.dtype)
        found = (ds @ wide_k[seen]).unflatten(1, p.shape[1:3])
        dq[block.row, block.begin : block.end] = _tokens_first(found).to(dq.dtype)
        own = wide_q[block.row, block.begin : block.end].permute(1, 2, 0, 3).flatten(1, 2)
        dk[seen] += widened(ds.mT @ own)
    return dq, dk.transpose(1, 2).contiguous().to(k.dtype), dv.transpose(1, 2).contiguous().to(v.dtype)


@register_gradient(sparse_attention_fwd, saves=("q", "k", "v", "choice", "scale"), saves_results=(0, 1), constant=(1,))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    out, sums = saved.results
    found = sparse_attention_bwd(grad, saved.q, saved.k, saved.v, out, sums, saved.choice, saved.scale)
    return dict(zip("qkv", found, strict=True))


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, choice: Tensor, *, scale: float) -> Tensor:
    """Return softmax attention of each query to the keys that `choice` names, [B, S, N, Dv]; zeros where it names none.

    q: [B, S, N, D], of the last S of L positions; k: [B, L, G, D]; v: [B, L, G, Dv], one dtype; choice: int32 [B, S,
    K], as `select_keys` returns it: no key behind its query and none twice; a negative number stands for no key.
    Differentiable once in q, k and v.
    """
    return sparse_attention_fwd(q, k, v, choice, scale)[0]
