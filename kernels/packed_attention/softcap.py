"""Attention with soft-capped scores on a CPU, a block of queries after the other, where our flash attention does not
serve: torch's kernel has no soft cap.

Scores s become c tanh(s / c) before the softmax (Gemma 2, arXiv 2408.00118). A block's scores are computed, used and
dropped, in the backward pass again from the log of each query's sum of exponentials. So memory is linear in the
tokens, and a causal block computes no scores of later keys.

One row: N query heads, G key/value heads of N / G queries each, Q queries, of the last of S keys.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..chunks import wide
from ..gemm.cpu import in_float32

ELEMENTS = 1 << 22
"""Scores that exist at one time, of all heads: 16 MiB in float32."""


def softcapped_fwd(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return attention [N, Q, Dv] and the log of each query's sum of exponentials, [N, Q], float32 (float64 of
    float64).

    q: [N, Q, D]; k: [G, S, D]; v: [G, S, Dv].
    """
    q, k, v = _working(q, k, v)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    logsumexp = q.new_empty(q.shape[:2], dtype=wide(q))
    for begin, end, keys in _blocks(q, k, causal):
        scores = _scores(q[:, begin:end], k[:, :keys], scale, softcap, causal)[0]
        logsumexp[:, begin:end] = own = scores.logsumexp(-1)
        probabilities = scores.sub_(own[..., None]).exp_().to(v.dtype)
        out[:, begin:end] = _product(probabilities, v[:, :keys])
    return out, logsumexp


def softcapped_bwd(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from results that a sink may be part of. grad, out: [N, Q, Dv]."""
    grad, q, k, v = _working(grad, q, k, v)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_out = (grad.to(wide(q)) * out.to(wide(q))).sum(-1)
    for begin, end, keys in _blocks(q, k, causal):
        queries, gradient = q[:, begin:end], grad[:, begin:end]
        scores, ratio = _scores(queries, k[:, :keys], scale, softcap, causal)
        probabilities = scores.sub_(logsumexp[:, begin:end, None]).exp_()
        dv[:, :keys] += _product_of_queries(probabilities.to(v.dtype), gradient, v.shape[0])
        ds = _product(gradient, v[:, :keys].mT).to(wide(q)).sub_(of_out[:, begin:end, None]).mul_(probabilities)
        ds = ds.mul_(ratio.square_().neg_().add_(1.0)).mul_(scale).to(q.dtype)
        dq[:, begin:end] = _product(ds, k[:, :keys])
        dk[:, :keys] += _product_of_queries(ds, queries, k.shape[0])
    return dq, dk, dv


def _working(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield tensors in the dtype in which this machine multiplies them."""
    floats = in_float32(tensors[0])
    return (t.float() if floats else t for t in tensors)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield from which to which query a block goes, and how many keys it sees."""
    heads, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    size = max(16, ELEMENTS // max(1, heads * keys))
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        yield begin, end, keys - queries + end if causal else keys


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the scores of queries, of the last of these keys, float32 [N, b, n], -inf of later keys, and their ratio
    to the softcap, of which that is not said."""
    ratio = _product(q, k.mT).to(wide(q)).mul_(scale / softcap).tanh_()
    scores = ratio * softcap
    if causal and q.shape[1] > 1:
        beside = scores[..., k.shape[1] - q.shape[1] :]
        later = torch.ones(beside.shape[-2:], dtype=torch.bool, device=beside.device).triu_(1)
        beside.masked_fill_(later, float("-inf"))
    return scores, ratio


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows [N, b, m] times the matrix [G, m, n] of their key/value head: [N, b, n]."""
    together = rows.reshape(matrix.shape[0], -1, rows.shape[-1])
    return torch.bmm(together, matrix).view(*rows.shape[:2], matrix.shape[-1])


def _product_of_queries(scores: Tensor, rows: Tensor, groups: int) -> Tensor:
    """Return the sum over the queries of each key/value head of scores [N, b, n] times rows [N, b, m]: [G, n, m]."""
    return torch.bmm(scores.reshape(groups, -1, scores.shape[-1]).mT, rows.reshape(groups, -1, rows.shape[-1]))
