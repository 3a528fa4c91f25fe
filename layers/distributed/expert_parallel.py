"""Expert parallelism: each rank of a group holds different tokens and different experts; this is what they exchange.

Two ways to the same numbers. By all-to-all each row travels to the rank of its expert and its result travels back: a
rank's rows are the rows that its experts multiply. Their number is data; the host learns it once per layer
(`exchange_splits`). By all-gather every rank gets the tokens of all, multiplies those that chose its experts, and the
sum over ranks is the layer's output: shapes follow from the number of tokens alone, so nothing waits for a router's
decision, and memory grows with the number of ranks. Sums over ranks run in float32 and are rounded once, as the sum of
a token's results on one rank is.

Where each expert is split, too, every rank of such a group gets the rows, or the tokens, of all of them, multiplies
them by its part of the experts, and the results are summed over the group.

n ranks, T tokens of a rank, K experts per token, E experts, E/n of each rank, R rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.asserted import asserted
from te_models.kernels.torch_versions import own_result, scalars_in_graphs

from ..collectives import all_gather, all_to_all, reduce_scatter, started_all_to_all, waited
from ..quantizer import Quantizer
from .quantized_rows import pack_rows, unpack_rows


class Splits(NamedTuple):
    """How rows travel. send: how many this rank sends to each rank; receive: how many it gets from each; numbers of the
    host, as the collective wants them. rows: [n, E/n] int64, on the device, how many of each rank's rows come for each
    expert of this rank; where m ranks split each expert, [m n, E/n], of the rows of all of these. shares: how many rows
    each of the m ranks received."""

    send: list[int]
    receive: list[int]
    rows: Tensor
    shares: list[int]


def expert_of_row(rows: Tensor, received: int) -> Tensor:
    """Return which of this rank's experts each received row is for: [R] int64. rows: of `Splits`; received: R."""
    experts = torch.arange(rows.shape[1], device=rows.device).repeat(rows.shape[0])
    return torch.repeat_interleave(experts, rows.flatten(), output_size=received)


def exchange_splits(
    tokens_per_expert: Tensor,
    group: str,
    ranks: int,
    *,
    balanced: int | None = None,
    split_group: str = "",
    split_ranks: int = 1,
) -> Splits:
    """Tell the other ranks how many rows come for their experts, and wait until the host knows all numbers.

    tokens_per_expert: [E] int64, of this rank's rows; group: a name, unused for one rank. balanced: assume that this
    many rows are spread evenly over the ranks, for tensors without values. split_group: the name
    of the group of the `split_ranks` ranks that split each expert, if there are several.
    """
    mine = tokens_per_expert.view(ranks, -1)
    rows = all_to_all(mine, group) if ranks > 1 else mine
    every = all_gather(rows, split_group) if split_ranks > 1 else rows
    if balanced is not None:
        even = [balanced // ranks + (rank < balanced % ranks) for rank in range(ranks)]
        return Splits(even, [even[0]] * ranks, every, [even[0] * ranks] * split_ranks)
    sizes = torch.cat([mine.sum(1), rows.sum(1), every.view(split_ranks, -1).sum(1)])
    with scalars_in_graphs():
        numbers = sizes.tolist()
    for size in numbers:  # which a graph has to know
        torch._check(size >= 0)
    return Splits(numbers[:ranks], numbers[ranks : 2 * ranks], every, numbers[2 * ranks :])


def exchange_rows(
    x: Tensor,
    send: list[int],
    receive: list[int],
    group: str,
    rows: Quantizer | None = None,
    gradients: Quantizer | None = None,
) -> Tensor:
    """[sum of send, H], rows in the order of the ranks that they go to -> [sum of receive, H], in the order of the
    ranks that they come from. The gradient travels back. group: a name; rows, gradients: what they travel as, see
    `quantized_rows`; None: their own dtype."""
    return _Exchanged.apply(x, send, receive, group, rows, gradients)


def exchange_rows_beside(
    x: Tensor, send: list[int], receive: list[int], group: str, beside: Callable[[], None]
) -> Tensor:
    """Return `exchange_rows` of plain rows, and call `beside` while they travel; in the backward pass the gradients of
    what it computes are made while theirs travel. Of eager code, where autograd runs what was computed last first."""
    way = _Way(send, receive, group)
    travelling = _Started.apply(x, way)
    try:
        beside()
    except BaseException:
        way.arrive()
        raise
    return _Arrived.apply(travelling, way)


class _Way:
    """An exchange that has been started. It holds what travels, and what is sent, until that has arrived: so that each
    collective is waited for once, whatever autograd hands from node to node."""

    def __init__(self, send: list[int], receive: list[int], group: str) -> None:
        self.send, self.receive, self.group = send, receive, group
        self._travels: tuple[Tensor, Tensor] | None = None

    def start(self, x: Tensor, receive: list[int], send: list[int]) -> None:
        """Send rows, and go on."""
        x = x.contiguous()
        self._travels = x, started_all_to_all(x, self.group, receive, send)

    def arrive(self) -> Tensor:
        """Wait for what was started, and return it."""
        assert self._travels is not None, "it has been started"
        (_, arriving), self._travels = self._travels, None
        return waited(arriving)


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.start(x, way.receive, way.send)
        return _standing_in(x, way.receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.way.arrive(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, travelling: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.arrive()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        way.start(dy, way.send, way.receive)
        return _standing_in(dy, way.receive), None


def _standing_in(x: Tensor, rows: list[int]) -> Tensor:
    """Return a tensor of the shape of what travels, for autograd, which reads none of its one number."""
    return x.new_zeros(1).expand(sum(rows), *x.shape[1:])


def _exchange(x: Tensor, send: list[int], receive: list[int], group: str, quantizer: Quantizer | None) -> Tensor:
    if quantizer is None:
        return all_to_all(x, group, receive, send)
    packed = all_to_all(pack_rows(x, quantizer), group, receive, send)
    return unpack_rows(packed, quantizer, x.shape[1], x.dtype)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send: list[int],
        receive: list[int],
        group: str,
        rows: Quantizer | None,
        gradients: Quantizer | None,
    ) -> Tensor:
        ctx.way = receive, send, group, gradients
        return own_result(_exchange(x, send, receive, group, rows))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(dy, *ctx.way), None, None, None, None, None


def repeat_rows(x: Tensor, shares: list[int], group: str) -> Tensor:
    """[R, H] of each rank of those that split each expert -> [sum of shares, H], the rows of all, in rank order. The
    gradient is summed over the ranks, in float32. shares: R of each; group: a name."""
    return _Repeated.apply(x, shares, group)


def sum_rows(y: Tensor, shares: list[int], rows: int, group: str) -> Tensor:
    """[sum of shares, H], each rank's part of the results of all rows -> this rank's `rows` of the sum over ranks, [R,
    H], added up in float32. What `repeat_rows` is undone by."""
    return _SummedRows.apply(y, shares, rows, group)


def _send_to_each(x: Tensor, shares: list[int], group: str) -> Tensor:
    return all_to_all(x.repeat(len(shares), 1), group, shares, [x.shape[0]] * len(shares))


def _sum_of_each(y: Tensor, shares: list[int], rows: int, group: str) -> Tensor:
    parts = all_to_all(y, group, [rows] * len(shares), shares)
    return parts.view(len(shares), rows, y.shape[1]).sum(0, dtype=torch.float32).to(y.dtype)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: list[int], group: str) -> Tensor:
        ctx.way = shares, x.shape[0], group
        return own_result(_send_to_each(x, shares, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_each(dy, *ctx.way), None, None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, shares: list[int], rows: int, group: str) -> Tensor:
        ctx.way = shares, group
        return own_result(_sum_of_each(y, shares, rows, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _send_to_each(dy, *ctx.way), None, None, None


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

    indices: [T, K] integer, all different for a token, so that it needs no more; weights: [T, K].
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
