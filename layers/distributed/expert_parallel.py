"""Expert parallelism: each rank of a group has tokens and experts of its own, and what the ranks tell each other.

Every rank gets the tokens of all, multiplies those that chose its experts, and gives each token's part of the result
back; the sum over ranks is the layer's output. Shapes follow from the number of tokens alone, so nothing waits for a
router's decision and no token is dropped. Sums over ranks run in float32 and are rounded once, as the sum of a token's
results on one rank is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.asserted import asserted
from te_models.kernels.torch_versions import own_result

from ..collectives import all_gather, reduce_scatter


def gather_tokens(x: Tensor, group: str) -> Tensor:
    """[T, ...] of each rank -> [ranks T, ...] float32, in rank order. The gradient is summed over ranks. group: a name.

    The ranks exchange x's own dtype; the result is float32 so that its gradient is.
    """
    return _Gathered.apply(x, group)


def sum_tokens(y: Tensor, group: str, dtype: torch.dtype) -> Tensor:
    """[ranks T, ...] float32 -> this rank's tokens of the sum over ranks, [T, ...] in `dtype`. group: a name."""
    return _Summed.apply(y, group, dtype)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group, ctx.dtype = group, x.dtype
        return own_result(all_gather(x, group).float())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.group).to(ctx.dtype), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: str, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, y.dtype
        return own_result(reduce_scatter(y, group).to(dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(dy, ctx.group).to(ctx.dtype), None, None


def local_choices(indices: Tensor, weights: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return (each token's choices as numbers of this rank's `experts`, counted from `first`, or `experts` for one of
    another rank; their weights), [T, K] each, or [T, experts] where those are fewer.

    indices: [T, K] integer, a token's all different, which is why it needs no more; weights: [T, K].
    """
    local = indices - first
    local = torch.where((local >= 0) & (local < experts), local, experts)
    if experts >= local.shape[1]:
        return local, weights
    local, order = local.sort(dim=1, stable=True)
    return local[:, :experts], weights.gather(1, order[:, :experts])


def check_same_tokens(tokens: int, device: torch.device, group: str) -> None:
    """Raise RuntimeError unless all ranks of the group have as many tokens. On an accelerator nobody waits for that."""
    counts = all_gather(torch.full((1,), tokens, dtype=torch.int64, device=device), group)
    asserted((counts == tokens).all(), "the ranks among which experts are distributed have different numbers of tokens")
