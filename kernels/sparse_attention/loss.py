"""What trains an indexer: how far the keys that it prefers are from those that attention uses (arXiv 2512.02556).

Loss and gradients are computed together, a block of queries after the other, so that nothing of the size of all scores
is kept. B batch, S queries, L keys, N query heads, G key heads, D channels, H index heads, I channels of one.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..chunks import wide
from ..custom_op import Output, like, operation, register_gradient
from .attend import block_probabilities, grouped_heads
from .blocks import chosen_of, hidden_of, operand, query_blocks
from .select import block_scores


def _results(index_q: Tensor, index_k: Tensor, weights: Tensor) -> tuple[Output, ...]:
    return like(index_q, (), wide(index_q)), like(index_q), like(index_k), like(weights)


@operation("indexer_loss", _results)
def indexer_loss_op(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    choice: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    heads_group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of `indexer_loss`, and its gradients in index_q, index_k and weights."""
    (queries, keys), dtype = (q.shape[1], k.shape[1]), wide(index_q)
    loss, count = (torch.zeros((), dtype=dtype, device=q.device) for _ in range(2))
    dq, dk, dw = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (index_q, index_k, weights))
    wide_q, wide_k = grouped_heads(q, k)
    own_q, own_k = operand(index_q), operand(index_k)
    for block in query_blocks(q, keys, q.shape[2] + index_q.shape[2]):
        if choice is None:
            unseen = hidden_of(block, hidden, queries, keys, q.device)
        else:
            unseen = ~chosen_of(block, choice)
        p, _ = block_probabilities(block, wide_q, wide_k, unseen, scale)
        target = p.sum((0, 1), dtype=dtype)
        if heads_group:
            target = sum_over_ranks(target, heads_group)
        target /= target.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
        products, scores = block_scores(block, own_q, own_k, weights)
        found = scores.masked_fill(unseen, -torch.inf).log_softmax(-1).masked_fill(unseen, 0.0)
        loss += (torch.xlogy(target, target) - target * found).sum()
        counts = ~unseen.all(-1)
        count += counts.sum()
        ds = torch.where(unseen, 0.0, found.exp() - target) * counts[:, None]
        mine = (block.row, slice(block.begin, block.end))
        dw[mine] = torch.einsum("hcl,cl->ch", products, ds)
        each = (products > 0) * ds * weights[mine].T.to(dtype)[..., None]
        of_queries = own_q[mine].transpose(0, 1)
        each = each.to(of_queries.dtype)
        dq[mine] = (each @ own_k[block.row, : block.keys]).transpose(0, 1).to(dtype)
        dk[block.row, : block.keys] += (each.mT @ of_queries).sum(0, dtype=dtype)
    count.clamp_(min=1)
    pairs = ((dq, index_q), (dk, index_k), (dw, weights))
    return loss / count, *((gradient / count).to(x.dtype) for gradient, x in pairs)  # type: ignore[return-value]


@register_gradient(indexer_loss_op, saves=(), saves_results=(1, 2, 3), constant=(1, 2, 3))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    names = ("index_q", "index_k", "weights")
    return {name: (x * grad).to(x.dtype) for name, x in zip(names, saved.results, strict=True)}


def indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    choice: Tensor | None,
    hidden: Tensor | None,
    *,
    scale: float,
    heads_group: str = "",
) -> Tensor:
    """Return how far the indexer is from attention, a float32 scalar: the mean over the queries that see a key of
    KL(p || softmax(index scores)), p being the probabilities of the keys, summed over heads and divided by their sum.

    index_q: [B, S, H, I]; index_k: [B, L, I]; weights: [B, S, H]; q: [B, S, N, D]; k: [B, L, G, D]. choice: as
    `select_keys` returns it, and both distributions are over the keys of each query that it names (sparse training);
    None: over all that a query sees (the dense warm-up), where `hidden`, as for `select_keys`, hides keys.
    heads_group: the name of the process group whose ranks have the other heads, and all else alike: collective, each
    has the loss and the gradients of all heads. Differentiable once in the first three; attention gets no gradient.
    """
    tensors = index_q, index_k, weights, q.detach(), k.detach(), choice, hidden
    return indexer_loss_op(*tensors, scale, heads_group)[0]


def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """Return the sum over the ranks of a group."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
