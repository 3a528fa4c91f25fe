"""Collectives along the first dimension, through functional collectives, so that they stay inside a graph.

group: a process group; None: the default one.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ....collectives import all_gather, all_reduce, check_group, reduce_scatter
from ...arguments import takes_also
from ..call import Computed, Gradients, OperationCall, OperationContext
from ..operation import BasicOperation


class _Collective(BasicOperation):
    """What collectives share: the name of a group, so that models can be copied, and nothing to save."""

    @takes_also(process_group="group")
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if group is not None:
            check_group("group", group)
        self.group_name = None if group is None else group.group_name

    def _gather(self, x: Tensor) -> Tensor:
        return all_gather(x, self._group())

    def _scatter(self, x: Tensor) -> Tensor:
        return reduce_scatter(x, self._group())

    def _group(self) -> Any:
        return dist.group.WORLD if self.group_name is None else self.group_name

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(self.collect(x))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        """Nothing is needed."""

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(self.collect_gradient(dy))

    def collect(self, x: Tensor) -> Tensor:
        """Return the collective's result."""
        raise NotImplementedError

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of the input."""
        raise NotImplementedError


class AllGather(_Collective):
    """[T, ...] of each rank -> [ranks T, ...], in rank order. The gradient is summed and scattered."""

    def collect(self, x: Tensor) -> Tensor:
        return self._gather(x)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        return self._scatter(dy)


class ReduceScatter(_Collective):
    """[ranks T, ...] -> this rank's part [T, ...] of the sum over ranks. The gradient is gathered."""

    def collect(self, x: Tensor) -> Tensor:
        return self._scatter(x)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        return self._gather(dy)


class AllReduce(_Collective):
    """The sum over ranks, on every rank. Every rank goes on with the same values, so the gradient passes unchanged."""

    def collect(self, x: Tensor) -> Tensor:
        return all_reduce(x, self._group())

    def collect_gradient(self, dy: Tensor) -> Tensor:
        return dy
