"""Collectives along the first dimension, through functional collectives, so that they stay inside a graph.

group: a process group; None: the default one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from ..call import Computed, Gradients, OperationCall, OperationContext
from ..operation import BasicOperation


class _Collective(BasicOperation):
    """What collectives share: a group, and nothing to save."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group

    def _gather(self, x: Tensor) -> Tensor:
        return _done(functional.all_gather_tensor(x.contiguous(), 0, self._group()))

    def _scatter(self, x: Tensor) -> Tensor:
        return _done(functional.reduce_scatter_tensor(x.contiguous(), "sum", 0, self._group()))

    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(self.collect(x))

    def collect(self, x: Tensor) -> Tensor:
        """Return the collective's result."""
        raise NotImplementedError

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        """Nothing is needed."""


def _done(x: Tensor) -> Tensor:
    """Return the tensor that a collective fills, when it has."""
    return functional.wait_tensor(x)


class AllGather(_Collective):
    """[T, ...] of each rank -> [ranks T, ...], in rank order. The gradient is summed and scattered."""

    def collect(self, x: Tensor) -> Tensor:
        return self._gather(x)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(self._scatter(dy))


class ReduceScatter(_Collective):
    """[ranks T, ...] -> this rank's part [T, ...] of the sum over ranks. The gradient is gathered."""

    def collect(self, x: Tensor) -> Tensor:
        return self._scatter(x)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(self._gather(dy))


class AllReduce(_Collective):
    """The sum over ranks, on every rank. Every rank goes on with the same values, so the gradient passes unchanged."""

    def collect(self, x: Tensor) -> Tensor:
        return _done(functional.all_reduce(x.contiguous(), "sum", self._group()))

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy)
