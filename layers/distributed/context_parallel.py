"""Context parallelism: the ranks of a group share each sequence, and gather the keys and values of all of it.

A sequence of S positions is cut into 2 n chunks for n ranks, and rank r has chunks r and 2 n - 1 - r: under a causal
mask the early chunk sees few keys and the late one many, so that all ranks have equally much to compute (arXiv
2407.21783, section 3.3.2). Queries stay where they are; a chunk attends to the keys up to its own last position, which
is attention as with a cache, whatever its window, sinks or soft cap. B batch, S positions of the whole sequence.

The ranks are counted as data parallel: each has the gradient of n times its share of the loss, and the average over the
ranks is the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels.torch_versions import own_result

from ..collectives import all_gather, all_reduce, check_member, reduce_scatter


class ContextShard(NamedTuple):
    """Which positions a rank has, of the `ranks` that share a sequence. group: the name of the process group."""

    rank: int
    ranks: int
    group: str

    def chunks(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (begin, end) of the rank's two chunks of a sequence of S = length positions."""
        size = length // (2 * self.ranks)
        first, second = self.rank * size, (2 * self.ranks - 1 - self.rank) * size
        return (first, first + size), (second, second + size)

    def check(self, length: int) -> None:
        """Raise ValueError where the ranks cannot share a sequence equally."""
        if length % (2 * self.ranks):
            raise ValueError(
                f"the sequence has {length} positions; allowed with {self.ranks} context-parallel ranks: a multiple of "
                f"{2 * self.ranks}"
            )


def context_shard(cp_group: dist.ProcessGroup | None) -> ContextShard | None:
    """Return this rank's place among the ranks of a group that share sequences; None where there is one. Raises
    ValueError for a group without this rank."""
    if cp_group is None:
        return None
    check_member("cp_group", cp_group)
    return ContextShard(cp_group.rank(), cp_group.size(), cp_group.group_name) if cp_group.size() > 1 else None


def own_positions(x: Tensor, shard: ContextShard | None, dim: int = 1) -> Tensor:
    """Return this rank's positions of what every rank has in full, S along `dim` -> S / ranks; all without a shard."""
    if shard is None:
        return x
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in shard.chunks(x.shape[dim])], dim)


def gather_positions(x: Tensor, shard: ContextShard) -> Tensor:
    """Return all positions in order, [B, S, ...] of [B, S / ranks, ...]. The gradient is summed over the ranks."""
    return _Gathered.apply(x, shard)


def gather_rows_of_ranks(x: Tensor, shard: ContextShard) -> Tensor:
    """Return the rows of all ranks, [ranks T, ...] of [T, ...], in rank order. The gradient is summed over ranks."""
    return _Rows.apply(x, shard.group)


def mean_of_ranks(x: Tensor, shard: ContextShard) -> Tensor:
    """Return the mean over the ranks, on every rank; each rank has the gradient of its summand times the number of
    ranks."""
    return _Mean.apply(x, shard)


def attention_of_chunks(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden_keys: Tensor | None,
    shard: ContextShard,
) -> Tensor:
    """Return attention of this rank's queries: q [B, S / ranks, ...] of its two chunks; k and v [B, S, ...] of all
    positions; hidden_keys [B, 1, 1 or S / ranks, S] bool, the numbers of documents [B, S] int64, or None ->
    [B, S / ranks, ...].

    attention: a function of queries, which are the last positions, of keys and values up to them, and of hidden keys
    [B, 1, 1 or queries, keys], or documents [B, keys].
    """
    parts = []
    for chunk, (queries, (_, end)) in enumerate(zip(q.chunk(2, 1), shard.chunks(k.shape[1]), strict=True)):
        hidden = None if hidden_keys is None else hidden_keys[..., :end]
        if hidden is not None and hidden.dim() == 4 and hidden.shape[2] > 1:
            hidden = hidden.chunk(2, 2)[chunk]
        parts.append(attention(queries, k[:, :end], v[:, :end], hidden))
    return torch.cat(parts, 1)


class _Gathered(torch.autograd.Function):
    """Rank r sends chunks (r, 2 n - 1 - r): of what arrives the first ones are in order, the second ones in reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        chunks = all_gather(x.movedim(1, 0), shard.group).unflatten(0, (shard.ranks, 2, -1))
        return torch.cat((chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1))).movedim(0, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        first, second = dy.movedim(1, 0).unflatten(0, (2, ctx.shard.ranks, -1))
        sent = torch.stack((first, second.flip(0)), 1).flatten(0, 2)
        return reduce_scatter(sent, ctx.shard.group).movedim(0, 1), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return own_result(all_gather(x, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.group), None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard) -> Tensor:
        return all_reduce(x, shard.group) / shard.ranks

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
