"""Context parallelism: the ranks of a group share each sequence, and reach the keys and values of all of it.

A sequence of S positions is cut into 2 n chunks for n ranks, and rank r has chunks r and 2 n - 1 - r: under a causal
mask the early chunk sees few keys and the late one many, so that all ranks have equally much to compute (arXiv
2407.21783, section 3.3.2). B batch, S positions of the whole sequence. There are three ways, `CpCommType`:

all_gather  keys and values of all positions are gathered; queries stay where they are, and a chunk attends to the keys
            up to its own last position, which is attention as with a cache
p2p         keys and values go round a ring of the ranks, see `te_models.layers.attention.ring` (arXiv 2310.01889)
a2a         each rank gets all positions of a part of the heads, and sends their results back (Ulysses, arXiv
            2309.14509)

The ranks are counted as data parallel: each has the gradient of n times its share of the loss, and the average over the
ranks is the gradient of the whole.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels.torch_versions import own_result
from te_models.suggestions import shown

from ..collectives import all_gather, all_reduce, all_to_all, check_member, reduce_scatter

CpCommType = Literal["all_gather", "p2p", "a2a"]
"""How attention reaches the keys and values of other ranks; the names are Megatron-Core's."""


class ContextShard(NamedTuple):
    """Which positions a rank has, of the `ranks` that share a sequence. group: the name of the process group."""

    rank: int
    ranks: int
    group: str
    cp_comm_type: CpCommType = "all_gather"

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


def context_shard(cp_group: dist.ProcessGroup | None, cp_comm_type: CpCommType = "all_gather") -> ContextShard | None:
    """Return this rank's place among the ranks of a group that share sequences; None where there is one. Raises
    ValueError for a group without this rank, and for another cp_comm_type."""
    if cp_comm_type not in get_args(CpCommType):
        allowed = ", ".join(map(repr, get_args(CpCommType)))
        raise ValueError(f"cp_comm_type is {shown(cp_comm_type)}; allowed: {allowed}")
    if cp_group is None:
        return None
    check_member("cp_group", cp_group)
    ranks = cp_group.size()
    return ContextShard(cp_group.rank(), ranks, cp_group.group_name, cp_comm_type) if ranks > 1 else None


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


def groups_by_ranks(groups: int, ranks: int) -> int:
    """Return how many key/value heads all ranks together have where each has all positions of a part of the heads: as
    many as there are, or each as often as the ranks that need it."""
    return math.lcm(groups, ranks)


def attention_of_heads(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden_keys: Tensor | None,
    shard: ContextShard,
) -> Tensor:
    """Return attention of this rank's queries by the exchange of heads: q [B, S / ranks, N, D], k [B, S / ranks, G, D]
    and v [B, S / ranks, G, Dv] of its two chunks -> [B, S / ranks, N Dv]. N: a multiple of the ranks.

    attention: a function of queries, keys and values [B, S, ...] of all positions of N / ranks heads and their keys,
    and of `hidden_keys`, which is of whole sequences.
    """
    ranks, groups = shard.ranks, k.shape[2]
    copies = groups_by_ranks(groups, ranks) // groups
    if copies > 1:
        k, v = (t.repeat_interleave(copies, 2) for t in (k, v))
    heads = [q.shape[2] // ranks, k.shape[2] // ranks, k.shape[2] // ranks]
    parts = [t.flatten(2).unflatten(2, (ranks, -1)) for t in (q, k, v)]
    every = _Exchange.apply(torch.cat(parts, -1), shard, True)[:, :, 0].split([p.shape[-1] for p in parts], -1)
    own = [t.unflatten(-1, (n, -1)) for t, n in zip(every, heads, strict=True)]
    y = attention(own[0], own[1], own[2], hidden_keys)
    return _Exchange.apply(y[:, :, None], shard, False).flatten(2)


def _to_heads(x: Tensor, shard: ContextShard) -> Tensor:
    """[B, S / ranks, ranks, F] -> [B, S, 1, F]: all positions of this rank's part of dimension 2."""
    arrived = all_to_all(x.movedim(2, 0).flatten(0, 1), shard.group).unflatten(0, (shard.ranks, -1))
    chunks = arrived.unflatten(2, (2, -1)).movedim(2, 0)  # [2, ranks, B, C, F]
    return torch.cat((chunks[0], chunks[1].flip(0))).movedim(0, 1).flatten(1, 2)[:, :, None]


def _to_positions(x: Tensor, shard: ContextShard) -> Tensor:
    """[B, S, 1, F] -> [B, S / ranks, ranks, F], the inverse of `_to_heads`."""
    first, second = x[:, :, 0].unflatten(1, (2, shard.ranks, -1)).movedim(0, 2)  # [ranks, B, C, F] each
    sent = torch.cat((first, second.flip(0)), 2)
    arrived = all_to_all(sent.flatten(0, 1), shard.group).unflatten(0, (shard.ranks, -1))
    return arrived.movedim(0, 2)


class _Exchange(torch.autograd.Function):
    """`_to_heads`, or `_to_positions`; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard, to_heads: bool) -> Tensor:
        ctx.shard, ctx.back = shard, _to_positions if to_heads else _to_heads
        return own_result(_to_heads(x, shard) if to_heads else _to_positions(x, shard))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy, ctx.shard), None, None


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
