"""Dispatchers: how tokens reach their experts and how results come back. Each way is a class of two methods.

`dispatch` makes the rows that this rank's experts read; `combine` makes each token's weighted sum of the results. What
`combine` has to know of the way there is in `Dispatched.way`; only its dispatcher reads it.

T tokens of this rank, K experts per token, E experts, R rows of this rank's experts, H hidden.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.permute import (
    Permutation,
    capacity_share,
    expert_capacity,
    fill_to_capacity,
    permute,
    sort_by_expert,
    unpermute,
)
from te_models.layers.collectives import all_gather
from te_models.layers.distributed.expert_parallel import (
    exchange_rows,
    exchange_rows_beside,
    exchange_splits,
    expert_of_row,
    gather_tokens,
    local_choices,
    repeat_rows,
    sum_rows,
    sum_tokens,
)
from te_models.layers.distributed.quantized_rows import RowFormats, row_formats

from ...config import MoEConfig
from ..build import Build
from .experts import Experts


class ComputedBeside:
    """What is computed while results travel, where a dispatcher's do. result: of the computation, once it was called.

    compute: makes it; a dispatcher calls it once at most.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.result: Tensor | None = None

    def __call__(self) -> None:
        self.result = self._compute()


class Dispatched(NamedTuple):
    """What experts read, as `Experts.forward` takes it, and what `combine` needs.

    rows: [R, H], or with `permutation` the tokens that they come from; rows_per_expert: [E of this rank], multiples of
    `align`. beside: what `combine` computes while results travel.
    """

    rows: Tensor
    rows_per_expert: Tensor
    permutation: Permutation | None
    align: int
    way: Any
    beside: ComputedBeside | None = None


class Dispatcher:
    """A way from tokens to experts and back. moe: of the layer; a capacity bounds what an expert takes.

    supposes_balance: whether rows travel as if all experts had equally many, for a plan, whose tensors have no values.
    needs_equal_shares: whether every rank has to bring equally many tokens.
    """

    supposes_balance = False
    needs_equal_shares = False

    def __init__(self, moe: MoEConfig) -> None:
        self.moe, factor = moe, moe.moe_expert_capacity_factor
        self._share = None if factor is None else capacity_share(factor, moe.num_moe_experts)

    def dispatch(self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor) -> Dispatched:
        """Send tokens to their experts. tokens: [T, H]; weights, indices: [T, K], indices of E where a choice was
        dropped."""
        raise NotImplementedError

    def combine(self, results: Tensor, dispatched: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Return each token's weighted sum [T, H] of results [R, H], and how many of these tokens chose each expert
        [E], without choices that were dropped; None where that is not known."""
        raise NotImplementedError

    def sums(
        self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor, beside: ComputedBeside | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Dispatch, compute and combine: what `combine` returns."""
        there = self.dispatch(experts, tokens, weights, indices)
        return self.combine(experts(*there[:4]), there if beside is None else there._replace(beside=beside))

    def capacity(self, slots: int) -> int | None:
        """Return how many of `slots` choices an expert takes; None: all."""
        return None if self._share is None else expert_capacity(slots, self._share)

    def _sorted(self, indices: Tensor, align: int = 1) -> Permutation:
        """Sort slots by expert; choices that were dropped are one expert more, whose rows come last."""
        return sort_by_expert(indices, self.moe.num_moe_experts + (self._share is not None), align=align)

    def _weighted(self, rows: Tensor, weights: Tensor, valid: Tensor, order: Permutation) -> tuple[Tensor, Tensor]:
        """Return the rows times their weights, for a configuration that weighs what experts read, and what then
        multiplies their results: 1 of choices that are `valid`, [T, K] bool, else 0."""
        rows = rows * weights.flatten()[order.slot_of_row.clamp(min=0)][:, None].to(rows.dtype)
        return rows, valid.to(weights.dtype)


class LocalDispatcher(Dispatcher):
    """This rank has all experts."""

    def dispatch(self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor) -> Dispatched:
        """Sort choices by expert; experts gather their rows from the tokens."""
        on_input, count = self.moe.router.apply_on_input, self.moe.num_moe_experts
        align = 1 if on_input else experts.linear_fc1.row_align(tokens.device)
        order = self._sorted(indices, align)
        if on_input:
            tokens, weights = self._weighted(permute(tokens, order), weights, indices < count, order)
        return Dispatched(tokens, order.rows_per_expert[:count], None if on_input else order, align, (order, weights))

    def combine(self, results: Tensor, dispatched: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Add up results by token."""
        order, weights = dispatched.way
        return unpermute(results, order, weights), order.tokens_per_expert[: self.moe.num_moe_experts]


class AllGatherDispatcher(Dispatcher):
    """Every rank gets the tokens of all, and adds up what its experts make of them."""

    needs_equal_shares = True

    def __init__(self, moe: MoEConfig, groups: list[str]) -> None:
        """groups: names of the process groups over which experts are distributed, and each of them split."""
        super().__init__(moe)
        self._groups = groups

    def dispatch(self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor) -> Dispatched:
        """Gather the tokens of all ranks, and sort the choices of this rank's experts."""
        local, dtype = experts.num_local_experts, tokens.dtype
        for group in self._groups:
            tokens, weights = gather_tokens(tokens, group), gather_tokens(weights, group)
            indices = all_gather(indices, group)
        indices, weights = local_choices(indices, weights, experts.first_expert, local)
        order = sort_by_expert(indices, local + 1)  # other ranks' experts as one, whose rows come last
        # tokens of all ranks are wider than their rows, so that the gradients that ranks add up are, too
        rows = permute(tokens, order, dtype=dtype)
        if self.moe.router.apply_on_input:
            rows = rows * weights.flatten()[order.slot_of_row][:, None].to(rows.dtype)
            weights = torch.ones_like(weights)
        return Dispatched(rows, order.tokens_per_expert[:local], None, 1, (order, weights))

    def combine(self, results: Tensor, dispatched: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Add up results by token, and over the ranks."""
        order, weights = dispatched.way
        y = unpermute(results, order, weights, dtype=torch.float32)
        for group in reversed(self._groups):
            y = sum_tokens(y, group, results.dtype if group == self._groups[0] else torch.float32)
        return y, None


class AllToAllDispatcher(Dispatcher):
    """Each row travels to the rank of its expert, and its result back.

    Where each expert is split over `split_ranks`, those get the rows of one another. quantized: rows travel as the
    recipe's operands.
    """

    def __init__(
        self, moe: MoEConfig, group: str, ranks: int, split_group: str, split_ranks: int, quantized: bool
    ) -> None:
        super().__init__(moe)
        self._group, self._ranks, self._quantized = group, ranks, quantized
        self._split_group, self._split_ranks = split_group, split_ranks

    def _formats(self, experts: Experts) -> RowFormats:
        if not self._quantized:
            return RowFormats()
        return row_formats(experts.linear_fc1.gemm_quantizers(), experts.linear_fc2.gemm_quantizers())

    def dispatch(self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor) -> Dispatched:
        """Sort choices by expert, and so by rank; exchange their rows, and sort again what has come."""
        moe, capacity, formats = self.moe, self.capacity(indices.numel()), self._formats(experts)
        order = self._sorted(indices)
        rows = permute(tokens, order)
        slots = rows.shape[0]
        if moe.router.apply_on_input:
            rows, weights = self._weighted(rows, weights, indices < moe.num_moe_experts, order)
        balanced = None
        if self.supposes_balance:
            balanced = slots if capacity is None else min(slots, moe.num_moe_experts * capacity)
        send, receive, by_rank, shares = exchange_splits(
            order.tokens_per_expert[: moe.num_moe_experts],
            self._group,
            self._ranks,
            balanced=balanced,
            split_group=self._split_group,
            split_ranks=self._split_ranks,
        )
        rows = rows if capacity is None else rows[: sum(send)]
        rows = rows if self._ranks == 1 else exchange_rows(rows, send, receive, self._group, formats.rows)
        received = rows.shape[0]
        if self._split_ranks > 1:
            rows = repeat_rows(rows, shares, self._split_group)
        align = experts.linear_fc1.row_align(rows.device)
        own = sort_by_expert(expert_of_row(by_rank, rows.shape[0])[:, None], experts.num_local_experts, align=align)
        dropped = None if capacity is None else slots - sum(send)
        way = order, weights, own, shares, received, send, receive, dropped, formats
        return Dispatched(rows, own.rows_per_expert, own, align, way)

    def combine(self, results: Tensor, dispatched: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Send results back, and add them up by token."""
        order, weights, own, shares, received, send, receive, dropped, formats = dispatched.way
        results = unpermute(results, own, None)
        if self._split_ranks > 1:
            results = sum_rows(results, shares, received, self._split_group)
        results = self._sent_back(results, receive, send, formats, dispatched.beside)
        if dropped is not None:  # choices that experts had no room for
            results = torch.cat([results, results.new_zeros(dropped, results.shape[1])])
        return unpermute(results, order, weights), order.tokens_per_expert[: self.moe.num_moe_experts]

    def _sent_back(
        self, results: Tensor, send: list[int], receive: list[int], formats: RowFormats, beside: ComputedBeside | None
    ) -> Tensor:
        """Return the results of this rank's tokens, in exchange for the results of other ranks' tokens."""
        if self._ranks == 1:
            return results
        if beside is None:
            return exchange_rows(results, send, receive, self._group, gradients=formats.gradients)
        assert formats.gradients is None, "the configuration has been checked"
        return exchange_rows_beside(results, send, receive, self._group, beside)


class PaddedAllToAllDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` where each expert gets as many rows as its capacity from every rank, so that shapes never
    change."""

    def dispatch(self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor) -> Dispatched:
        """Fill each expert's room with its rows and empty ones, and exchange them."""
        moe, ranks, room, formats = self.moe, self._ranks, self.capacity(indices.numel()), self._formats(experts)
        assert room is not None, "the configuration has been checked"
        order = fill_to_capacity(indices, moe.num_moe_experts, room)
        rows = permute(tokens, order)
        slots = rows.shape[0]
        if moe.router.apply_on_input:
            rows, weights = self._weighted(rows, weights, indices < moe.num_moe_experts, order)
        local = experts.num_local_experts
        splits = [local * room] * ranks
        rows = exchange_rows(rows[: sum(splits)], splits, splits, self._group, formats.rows)
        rows = rows.view(ranks, local, room, -1).transpose(0, 1).flatten(0, 2)
        per_expert = torch.full((local,), ranks * room, device=rows.device)
        return Dispatched(rows, per_expert, None, 1, (order, weights, local, room, splits, slots, formats))

    def combine(self, results: Tensor, dispatched: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Send results back, and add up by token those that are not empty."""
        order, weights, local, room, splits, slots, formats = dispatched.way
        results = results.view(local, self._ranks, room, -1).transpose(0, 1).flatten(0, 2)
        results = self._sent_back(results, splits, splits, formats, dispatched.beside)
        results = torch.cat([results, results.new_zeros(slots - sum(splits), results.shape[1])])
        return unpermute(results, order, weights), order.tokens_per_expert[: self.moe.num_moe_experts]


class DeepEPDispatcher(Dispatcher):
    """Each token travels once to each rank of its experts, and its partial sum back, by the library deep_ep."""

    def __init__(self, moe: MoEConfig, group: str) -> None:
        super().__init__(moe)
        self._group = group

    def dispatch(self, experts: Experts, tokens: Tensor, weights: Tensor, indices: Tensor) -> Dispatched:
        """Send tokens, and sort those that have come by expert."""
        from te_models.layers.distributed import deepep  # imports the compiler, whose graphs it ends

        moe, capacity = self.moe, self.capacity(indices.numel())
        rows = indices.numel() if capacity is None else min(indices.numel(), moe.num_moe_experts * capacity)
        balanced = rows if self.supposes_balance else None
        received = deepep.dispatch_tokens(tokens, weights, indices, moe.num_moe_experts, self._group, balanced=balanced)
        x, order = deepep.local_rows(received, experts.num_local_experts)
        weights = received.weights
        if moe.router.apply_on_input:
            x, weights = self._weighted(x, weights, received.experts >= 0, order)
        return Dispatched(x, order.rows_per_expert, None, 1, (order, weights, received))

    def combine(self, results: Tensor, dispatched: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Add up results by token that has come, and send the sums back."""
        from te_models.layers.distributed import deepep

        order, weights, received = dispatched.way
        return deepep.combine_tokens(unpermute(results, order, weights), received), received.chosen


def dispatcher_of(moe: MoEConfig, build: Build) -> Dispatcher:
    """Return the way that a build asks for: `LocalDispatcher` where this rank has every expert whole."""
    ranks, group = build.expert_model_parallel_size, "" if build.ep_group is None else build.ep_group.group_name
    split_ranks, split_group = 1, ""
    if build.etp_group is not None:
        split_ranks, split_group = build.etp_group.size(), build.etp_group.group_name
    if ranks == split_ranks == 1:
        return LocalDispatcher(moe)
    if build.expert_dispatch == "all_gather":
        return AllGatherDispatcher(
            moe, [name for name, size in ((group, ranks), (split_group, split_ranks)) if size > 1]
        )
    if build.expert_dispatch == "deepep":
        return DeepEPDispatcher(moe, group)
    way = PaddedAllToAllDispatcher if moe.moe_pad_expert_input_to_capacity else AllToAllDispatcher
    return way(moe, group, ranks, split_group, split_ranks, build.expert_dispatch == "all_to_all_quantized")
