"""Which keys a query sees: the indexer's scores, and the best of them.

B batch, S queries, L keys, K keys of a query, H index heads, I channels of an index head.
"""

from typing import Any

import torch
from torch import Tensor

from ..custom_op import Output, operation
from .blocks import Block, hidden_of, operand, query_blocks, widened


def block_scores(block: Block, q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of a block's index queries and keys above zero, [H, C, block.keys], and their weighted sum,
    [C, block.keys]. q: [B, S, H, I], k: [B, L, I], both as `operand`; weights: [B, S, H]."""
    own = q[block.row, block.begin : block.end].transpose(0, 1)
    products = widened(own @ k[block.row, : block.keys].T).relu_()
    own_weights = weights[block.row, block.begin : block.end].to(products.dtype)
    return products, torch.einsum("hcl,ch->cl", products, own_weights)


def _choice(q: Tensor, k: Tensor, topk: int) -> Output:
    keys: Any = torch.sym_min(topk, k.shape[1])
    return Output((*q.shape[:2], keys), torch.int32, q.device)


@operation("select_keys", _choice)
def select_keys(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, hidden: Tensor | None, eligible: Tensor | None = None
) -> Tensor:
    """Return the `topk` keys with the best scores of each query, int32 [B, S, min(topk, L)], the best first; of equal
    ones the earlier; -1 where a query sees fewer. No gradient.

    q: [B, S, H, I], of the last S of L positions, none of which sees one behind itself; k: [B, L, I]; weights: [B, S,
    H]; hidden: bool [B or 1, 1 or S, L], the numbers of documents int64 [B, L], or None; eligible: bool [B or 1, L],
    the keys that can be chosen; None: all. A score is `sum_h w_h ReLU(q_h . k)`, in float32 (arXiv 2512.02556, equation
    1).
    """
    queries, keys = q.shape[1], k.shape[1]
    choice = torch.full((*q.shape[:2], min(topk, keys)), -1, dtype=torch.int32, device=q.device)
    q, k = operand(q), operand(k)
    for block in query_blocks(q, keys, q.shape[2]):
        _, scores = block_scores(block, q, k, weights)
        scores.masked_fill_(hidden_of(block, hidden, queries, keys, q.device), -torch.inf)
        if eligible is not None:
            scores.masked_fill_(~eligible[min(block.row, eligible.shape[0] - 1), : block.keys], -torch.inf)
        best, places = scores.sort(dim=-1, descending=True, stable=True)
        found = torch.where(best > -torch.inf, places, -1)[:, : choice.shape[2]]
        choice[block.row, block.begin : block.end, : found.shape[1]] = found.to(torch.int32)
    return choice
