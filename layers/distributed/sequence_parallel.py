"""Sequence parallelism around split layers: between them each rank has its own tokens only (arXiv 2205.05198).

The layers of `tensor_parallel` gather their input and scatter their output themselves. Here is what the rest needs:
norms over a rank's own tokens, whose weights every rank has, and parts of a model that compute with all tokens on every
rank, such as a router. T tokens of all ranks, in rank order along the first dimension.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_models.kernels.torch_versions import own_result

from ..collectives import all_gather
from .tensor_parallel import with_summed_gradient


class SequenceShard(NamedTuple):
    """Which tokens a rank has: number `rank` of `ranks` equal parts. group: the name of the process group."""

    rank: int
    ranks: int
    group: str


def gather_tokens_of_ranks(x: Tensor, shard: SequenceShard) -> Tensor:
    """Return the tokens of all ranks, [T, ...] of [T / ranks, ...], with which every rank goes on to compute the same;
    each then has the whole gradient, and keeps its own tokens' part."""
    return _Gathered.apply(x, shard)


def own_tokens(x: Tensor, shard: SequenceShard) -> Tensor:
    """Return this rank's tokens, [T / ranks, ...] of [T, ...], of what every rank has in full. Gradients are gathered.

    Raises ValueError where the ranks cannot share the tokens equally.
    """
    if x.shape[0] % shard.ranks:
        raise ValueError(f"there are {x.shape[0]} tokens, which {shard.ranks} ranks cannot share equally")
    return _Own.apply(x, shard)


def own_share(x: Tensor, shard: SequenceShard, fill: float = 0) -> Tensor:
    """`own_tokens` of any number T of tokens: as if `fill` followed them up to a multiple of the ranks."""
    missing = -x.shape[0] % shard.ranks
    return own_tokens(torch.cat([x, x.new_full((missing, *x.shape[1:]), fill)]) if missing else x, shard)


def norm_own_tokens(norm: nn.Module, x: Tensor, shard: SequenceShard | None) -> Tensor:
    """Return `norm(x)` of this rank's tokens; the gradients of the norm's parameters are summed over the ranks. shard
    None: each rank has all tokens."""
    if shard is None:
        return norm(x)
    shared = {name: with_summed_gradient(p, shard.group) for name, p in norm.named_parameters()}
    return torch.func.functional_call(norm, shared, (x,))


def _own(x: Tensor, shard: SequenceShard) -> Tensor:
    size = x.shape[0] // shard.ranks
    return x.narrow(0, shard.rank * size, size).clone()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return own_result(all_gather(x, shard.group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _own(dy, ctx.shard), None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return _own(x, shard)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.shard.group), None
