"""Expert parallelism by the library deep_ep (https://github.com/deepseek-ai/DeepEP): a token travels once to each rank
that has one of its experts, with its choices and their weights, and the rank's part of its weighted sum travels back.

By all-to-all a token travels once for each of its experts. Here the rows of several experts of a rank are copied, and
their results added up, where the experts are: if a token chooses 8 of 256 experts over 8 ranks, 5.3 T tokens travel in
place of 8 T rows. The price is one more rounding, of each rank's part of a sum to the dtype that travels.

The backward pass of a dispatch is a combination: it adds up the ranks' gradients of a token and brings the gradients of
its weights; the backward pass of a combination is a dispatch that repeats the layout of the first one. deep_ep computes
the order of the received tokens, and waits on the host for their number; `local_rows` sorts them by expert.

deep_ep sends bfloat16 between CUDA devices alone, and torch cannot trace it: a compiled graph ends before each call.

n ranks, T tokens of a rank, K experts per token, E experts, E/n of each rank, R tokens received, N rows that they make.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.extras import MissingExtraError
from te_models.kernels.permute import Permutation, sort_by_expert, unpermute
from te_models.kernels.without_autocast import compute_dtype

from ..collectives import all_to_all, resolve_group

DEVICE, DTYPE = "cuda", torch.bfloat16
"""Where deep_ep works, and what it sends and adds up."""
NODE_RANKS = 8
"""The ranks that deep_ep takes for one node, connected by NVLink."""
UNTRACEABLE = "expert_dispatch is 'deepep', whose calls torch cannot trace; allowed in one graph: 'all_to_all'"


class Received(NamedTuple):
    """What a rank received. x: [R, H]. weights: [R, K] float32. experts: [R, K] int64, each choice as a number of this
    rank's experts, -1 for an expert of another rank. rows: N, how many choices are of this rank's experts.
    chosen: [E] int64, how many of the rank's own tokens chose each expert. way: the buffer and the layout of what it
    sent, for `combine_tokens`."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    rows: int
    chosen: Tensor
    way: tuple[Any, Any]


def check_available(ranks: int, device: torch.device) -> None:
    """Raise a sentence where tokens of a model on this device cannot travel by deep_ep: ValueError for another device
    and for a number of ranks that the library has no settings for, MissingExtraError where it is not installed."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(torch.empty(0, device="cpu"), FakeTensor):  # a plan needs neither
        return
    if device.type not in (DEVICE, "meta"):
        raise ValueError(f"expert_dispatch is 'deepep' on the device {device}; allowed: a CUDA device, or 'all_to_all'")
    try:
        _library().Buffer.get_dispatch_config(ranks)
    except AssertionError:
        raise ValueError(
            f"expert_dispatch is 'deepep' for {ranks} ranks; allowed: the numbers of ranks that deep_ep has settings "
            "for, such as 2, 4, 8 and 16, or 'all_to_all'"
        ) from None


def _library() -> Any:
    try:
        import deep_ep  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise
        raise MissingExtraError(
            "expert_dispatch 'deepep' needs the package 'deep_ep', which is built from "
            "https://github.com/deepseek-ai/DeepEP; allowed without it: 'all_to_all' and 'all_gather'",
            name="deep_ep",
        ) from None
    return deep_ep


@torch.compiler.disable(reason=UNTRACEABLE)
def dispatch_tokens(
    x: Tensor, weights: Tensor, indices: Tensor, experts: int, group: str, *, balanced: int | None = None
) -> Received:
    """Send each token to the ranks of its experts.

    x: [T, H]; it travels in the compute dtype; weights, indices: [T, K], an index of E or more, `experts`, for no
    expert. group: a name. balanced: assume independent choices that make this many rows, for tensors without values.
    Raises ValueError for another compute dtype than `DTYPE`, and as `check_available`.
    """
    ranks = resolve_group(group)
    dtype = compute_dtype(x)
    if dtype != DTYPE:
        raise ValueError(
            f"expert_dispatch is 'deepep' and the compute dtype {dtype}; allowed: {DTYPE}, or 'all_to_all'"
        )
    if balanced is None:
        check_available(ranks.size(), x.device)
        buffer = _buffer(ranks, x.shape[1] * DTYPE.itemsize)
    else:
        buffer = _SupposedBuffer(group, ranks.size(), balanced)
    choices = torch.where(indices < experts, indices, -1).contiguous()
    return Received(
        *_Dispatched.apply(x.to(dtype).contiguous(), weights.float().contiguous(), choices, experts, buffer)
    )


@torch.compiler.disable(reason=UNTRACEABLE)
def combine_tokens(y: Tensor, received: Received) -> Tensor:
    """Return the sum of each token's parts over the ranks that received it: y [R, H], a part of each received token ->
    [T, H] in y's dtype."""
    buffer, handle = received.way
    return _Combined.apply(y.contiguous(), handle, buffer)


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, indices: Tensor, experts: int, buffer: Any) -> tuple[Any, ...]:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(indices, experts)
        x, chosen, weights, rows, handle, _ = buffer.dispatch(
            x,
            topk_idx=indices,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.way = buffer, handle
        counts = per_expert.long()
        ctx.mark_non_differentiable(chosen, counts)
        return x, weights, chosen, sum(rows), counts, (buffer, handle)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, d_weights: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None, None]:
        buffer, handle = ctx.way
        dx, d_weights, _ = buffer.combine(dx.contiguous(), handle, topk_weights=d_weights.contiguous())
        return dx, d_weights, None, None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any, buffer: Any) -> Tensor:
        ctx.way = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        buffer, handle = ctx.way
        return buffer.dispatch(dy.contiguous(), handle=handle)[0], None, None


def local_rows(received: Received, experts: int) -> tuple[Tensor, Permutation]:
    """Return the received tokens as rows sorted by expert, [N + 1, H], and their order, for `unpermute`.

    The last row is zero and of no expert: what `unpermute` reads for a choice of another rank's expert, in place of
    R K - N rows that nobody multiplies. Without received tokens there is no row. experts: how many this rank has.
    """
    x, chosen, rows = received.x, received.experts, received.rows
    others = min(1, x.shape[0])
    order = sort_by_expert(torch.where(chosen < 0, experts, chosen), experts + 1)
    slot_of_row = torch.cat([order.slot_of_row[:rows], order.slot_of_row.new_full((others,), -1)])
    order = Permutation(
        slot_of_row,
        order.row_of_slot.clamp(max=rows),
        order.tokens_per_expert[:experts],
        order.rows_per_expert[:experts],
        torch.arange(rows, rows + others, device=x.device),
    )
    return _LocalRows.apply(x, order), order


class _LocalRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        rows = x[order.slot_of_row.clamp(min=0) // order.row_of_slot.shape[1]]
        rows[order.padding_rows] = 0
        return rows

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # the gradient of a row past the last expert's is zero, as the row is
        return unpermute(dy, ctx.order, None), None


def _buffer(group: dist.ProcessGroup, token_bytes: int) -> Any:
    """Return the buffer for tokens of this many bytes, as large as deep_ep's settings of this moment ask for."""
    buffers, ranks = _library().Buffer, group.size()
    settings = buffers.get_dispatch_config(ranks), buffers.get_combine_config(ranks)
    node = max(setting.get_nvl_buffer_size_hint(token_bytes, ranks) for setting in settings)
    network = 0
    if ranks > NODE_RANKS:  # built without NVSHMEM, the library cannot even say that one node needs none
        network = max(setting.get_rdma_buffer_size_hint(token_bytes, ranks) for setting in settings)
    return _allocated(group, node, network)


@functools.cache
def _allocated(group: dist.ProcessGroup, node: int, network: int) -> Any:
    """Return the one buffer of a group of these sizes; all layers use it in turn."""
    return _library().Buffer(group, node, network)


class _SupposedBuffer:
    """Stands for a buffer in a plan: what tokens without values would take, if each rank received as many.

    rows: of each rank. A token has none of a rank's E/n experts with probability C(E - E/n, K) / C(E, K).
    """

    def __init__(self, group: str, ranks: int, rows: int) -> None:
        self._group, self._ranks, self._rows = group, ranks, rows

    def get_dispatch_layout(self, indices: Tensor, experts: int) -> tuple[None, None, Tensor, None, None]:
        """Return the counts of the experts' tokens without values; nothing else is needed."""
        return None, None, indices.new_zeros(experts, dtype=torch.int32), None, None

    def dispatch(self, x: Tensor, *, handle: Any = None, **layout: Any) -> tuple[Any, ...]:
        """Send each rank as many tokens as it is supposed to receive."""
        if handle is not None:
            return self._exchanged(x, handle[0]), None, None, None, None, None
        weights, (experts,) = layout["topk_weights"], layout["num_tokens_per_expert"].shape
        tokens, choices = weights.shape
        missed = math.comb(experts - experts // self._ranks, choices) / math.comb(experts, choices)
        share = math.ceil(tokens * (1 - missed))
        received = share * self._ranks, choices
        chosen, received_weights = layout["topk_idx"].new_zeros(received), weights.new_zeros(received)
        return self._exchanged(x, share), chosen, received_weights, [self._rows], (share, tokens), None

    def combine(self, y: Tensor, handle: tuple[int, int], topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        """Send the parts back."""
        share, tokens = handle
        self._exchanged(y, share)
        weights = None if topk_weights is None else topk_weights.new_zeros(tokens, topk_weights.shape[1])
        return y.new_zeros(tokens, y.shape[1]), weights, None

    def _exchanged(self, x: Tensor, share: int) -> Tensor:
        return all_to_all(x.new_empty(share * self._ranks, x.shape[1]), self._group)
