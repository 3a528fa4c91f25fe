"""A stand-in for the library deep_ep, over gloo on a CPU: the part of `Buffer` that tokens of training use, with the
signatures of deep_ep 1.x, the types and layouts that its kernels insist on, and its results, computed plainly.

What a caller may get wrong is an error: an argument by another name, another dtype or memory layout, a layout that
belongs to other tokens, a buffer that is too small, a number of ranks without settings."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SENT = torch.bfloat16
"""The only dtype of tokens; tests of exactness put another one here."""
HEADER_BYTES = 1000


class Config:
    """Settings of a kernel; what a buffer needs for them is a made-up number that grows with a token's bytes."""

    def __init__(self, num_sms: int = 20, *chunks: int) -> None:
        assert num_sms % 2 == 0
        self.chunks = chunks

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks <= 8 or num_ranks % 8 == 0
        return HEADER_BYTES + self.chunks[0] * num_ranks * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        raise AssertionError("NVSHMEM is disabled: there is no network between nodes")


class EventOverlap:
    """What a caller would wait for, had it asked not to wait."""


class Handle(NamedTuple):
    """How tokens went. sent: of each rank the numbers of the tokens that went there; received: how many came."""

    buffer: Buffer
    tokens: int
    sent: list[Tensor]
    received: list[int]
    in_rank: Tensor


class Buffer:
    num_sms = 20
    calls: list[str] = []  # noqa: RUF012 (of the whole process)
    made: list[Buffer] = []  # noqa: RUF012

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        assert isinstance(group, dist.ProcessGroup) and not low_latency_mode
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        sizes: list[Any] = [None] * self.group_size
        dist.all_gather_object(sizes, (num_nvl_bytes, num_rdma_bytes), group)  # all ranks make theirs together
        assert set(sizes) == {(num_nvl_bytes, num_rdma_bytes)}
        self.made.append(self)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 6)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 9)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert not (previous_event or async_finish or allocate_on_comm_stream), "the caller does not wait"
        self._check(topk_idx, torch.int64, 2)
        assert num_experts % self.group_size == 0
        assert bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())
        chosen = topk_idx[:, :, None] == torch.arange(num_experts)
        in_rank = chosen.view(*topk_idx.shape, self.group_size, -1).any(3).any(1)
        return in_rank.sum(0).int(), None, chosen.sum((0, 1)).int(), in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        assert config is None and not (previous_event or async_finish or allocate_on_comm_stream)
        self._check(x, SENT, 2)
        assert x.shape[1] * SENT.itemsize % 16 == 0
        assert self.num_nvl_bytes >= HEADER_BYTES + 9 * self.group_size * x.shape[1] * SENT.itemsize
        self.calls.append("dispatch" if handle is None else "dispatch again")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            assert handle.buffer is self and handle.tokens == x.shape[0]
            return self._send(x, handle), None, None, None, None, EventOverlap()
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and num_tokens_per_rdma_rank is None
        self._check(num_tokens_per_rank, torch.int32, 1)
        self._check(num_tokens_per_expert, torch.int32, 1)
        self._check(is_token_in_rank, torch.bool, 2)
        self._check(topk_idx, torch.int64, 2)
        self._check(topk_weights, torch.float32, 2)
        assert x.shape[0] == topk_idx.shape[0] == is_token_in_rank.shape[0] and topk_weights.shape == topk_idx.shape
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int())
        counts: list[Any] = [None] * self.group_size
        dist.all_gather_object(counts, num_tokens_per_rank.tolist(), self.group)
        received = [of_rank[self.rank] for of_rank in counts]
        sent = [of_rank.nonzero().flatten() for of_rank in is_token_in_rank.T]
        handle = Handle(self, x.shape[0], sent, received, is_token_in_rank)
        local = num_tokens_per_expert.shape[0] // self.group_size
        index = self._send(topk_idx, handle) - self.rank * local
        mine = (index >= 0) & (index < local)
        weights = torch.where(mine, self._send(topk_weights, handle), 0)
        index = torch.where(mine, index, -1)
        every = [int((index == expert).sum()) for expert in range(local)]
        filled = [-(-count // expert_alignment) * expert_alignment for count in every]
        return self._send(x, handle), index, weights, filled, handle, EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert bias is None and config is None and not (previous_event or async_finish or allocate_on_comm_stream)
        self._check(x, SENT, 2)
        assert isinstance(handle, Handle) and handle.buffer is self and sum(handle.received) == x.shape[0]
        self.calls.append("combine" if topk_weights is None else "combine weights")
        weights = None
        if topk_weights is not None:
            self._check(topk_weights, torch.float32, 2)
            assert topk_weights.shape[0] == x.shape[0]
            weights = self._sum(topk_weights, handle)
        return self._sum(x, handle), weights, EventOverlap()

    def _send(self, values: Tensor, handle: Handle) -> Tensor:
        """The tokens of this rank to the ranks that they go to; returns those that came, by rank."""
        return self._exchange([values[tokens] for tokens in handle.sent], handle.received)

    def _sum(self, values: Tensor, handle: Handle) -> Tensor:
        """What came of each token back to its rank, added up in float32 in the order of the ranks, rounded once."""
        sizes = [tokens.shape[0] for tokens in handle.sent]
        back = self._exchange([*values.split(handle.received)], sizes).split(sizes)
        total = torch.zeros(handle.tokens, values.shape[1])
        for tokens, part in zip(handle.sent, back, strict=True):
            total[tokens] += part.float()
        return total.to(values.dtype)

    def _exchange(self, parts: list[Tensor], sizes: list[int]) -> Tensor:
        like = parts[0]
        into = like.new_empty(sum(sizes), *like.shape[1:])
        dist.all_to_all_single(into, torch.cat(parts), sizes, [part.shape[0] for part in parts], group=self.group)
        return into

    @staticmethod
    def _check(t: Tensor, dtype: torch.dtype, dims: int) -> None:
        assert t.dtype == dtype, f"{t.dtype} in place of {dtype}"
        assert t.dim() == dims and t.is_contiguous()


def install() -> None:
    """Let `import deep_ep` find this."""
    module: Any = ModuleType("deep_ep")
    module.Buffer, module.Config, module.EventOverlap = Buffer, Config, EventOverlap
    sys.modules["deep_ep"] = module
