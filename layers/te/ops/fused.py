"""Fused operations: several basic ones in one step. `FUSIONS` lists what the fuser looks for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .basic.activation import ActivationOperation, ScaledActivation
from .basic.elementwise import AddExtraInput, Bias, ConstantScale, MakeExtraOutput
from .basic.grouped_linear import GroupedLinear
from .basic.linear import BasicLinear
from .call import Computed, Gradients, Input, OperationCall, OperationContext
from .operation import BasicOperation, FusedOperation


def begins_with(operations: Sequence[BasicOperation], *kinds: type[BasicOperation], backward: bool = False) -> bool:
    """Whether the first operations are of these kinds, and have their forward (or backward) pass.

    A subclass that overrides a pass is not what the fusion computes, and runs apart.
    """
    if len(operations) < len(kinds):
        return False
    return all(_fits(operation, kind, backward) for operation, kind in zip(operations, kinds, strict=False))


def _fits(operation: BasicOperation, kind: type[BasicOperation], backward: bool) -> bool:
    if not isinstance(operation, kind):
        return False
    cls = type(operation)
    if backward:
        return cls.op_backward is kind.op_backward
    return cls.SPLIT_FORWARD and cls.op_forward_compute is kind.op_forward_compute


class ForwardGroupedMLP(FusedOperation):
    """Grouped linear, activation, grouped linear: the rows are located once where both take the same splits."""

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        between = (ActivationOperation, ScaledActivation)
        return 3 if any(begins_with(operations, GroupedLinear, kind, GroupedLinear) for kind in between) else 0

    def fuser_forward_compute(self, x: Input, calls: Sequence[OperationCall]) -> tuple[Computed, ...]:
        first, between, last = self.operations
        assert isinstance(first, GroupedLinear) and isinstance(last, GroupedLinear), "a fusion is made as it matched"
        assert not isinstance(x, tuple), "grouped rows come unquantized"
        rows = first.rows_of(x, calls[0])
        up = first.compute_rows(x, rows, calls[0])
        hidden = between.op_forward_compute(up.output, calls[1])
        assert not isinstance(hidden.output, tuple), "grouped rows are quantized by group, after the activation"
        if calls[0].extra_inputs[0] is not calls[2].extra_inputs[0]:
            rows = last.rows_of(hidden.output, calls[2])
        return up, hidden, last.compute_rows(hidden.output, rows, calls[2])

    fuser_forward_save_ctx = FusedOperation.save_each


class _ForwardLinear(FusedOperation):
    """What forward fusions share: a linear operation, perhaps with its bias in the GEMM's epilogue, and others."""

    def fuser_forward_compute(self, x: Input, calls: Sequence[OperationCall]) -> tuple[Computed, ...]:
        linear, first = self.operations[0], calls[0]
        assert isinstance(linear, BasicLinear), "a fusion begins as it matched"
        biased = isinstance(self.operations[1], Bias)
        found = [linear.compute_with_bias(x, calls[1].parameters[0] if biased else None, first)]
        if biased:
            found.append(Computed(found[0].output))
        for operation, call in list(zip(self.operations, calls, strict=True))[len(found) :]:
            found.append(self._then(operation, found[-1].output, call))
        return tuple(found)

    def _then(self, operation: BasicOperation, y: Any, call: OperationCall) -> Computed:
        """Run an operation on the output of the GEMM, in place where that is possible."""
        if isinstance(operation, AddExtraInput):
            (extra,) = call.extra_inputs
            return Computed(operation.into_extra(y, extra) if operation.in_place else y.add_(extra.to(y.dtype)))
        if isinstance(operation, ConstantScale):
            return Computed(y.mul_(operation.scale))
        return operation.op_forward_compute(y, call)

    fuser_forward_save_ctx = FusedOperation.save_each


class ForwardLinearBiasActivation(_ForwardLinear):
    """GEMM with the bias in its epilogue, then an activation if one follows; it may hand over quantized data."""

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        if begins_with(operations, BasicLinear, Bias, ActivationOperation):
            return 3
        return 2 if begins_with(operations, BasicLinear, Bias) else 0


class ForwardLinearBiasAdd(_ForwardLinear):
    """GEMM with the bias, if one follows, in its epilogue; then an extra input is added in place."""

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        if begins_with(operations, BasicLinear, Bias, AddExtraInput):
            return 3
        return 2 if begins_with(operations, BasicLinear, AddExtraInput) else 0


class ForwardLinearScaleAdd(_ForwardLinear):
    """GEMM; its result is scaled, and an extra input added, in place."""

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        return 3 if begins_with(operations, BasicLinear, ConstantScale, AddExtraInput) else 0


class BackwardLinearAdd(FusedOperation):
    """Where an input is used twice, its other gradient is added to dgrad in place."""

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        return 2 if begins_with(operations, MakeExtraOutput, BasicLinear, backward=True) else 0

    def fuser_backward(
        self, contexts: Sequence[OperationContext], dy: Tensor, extra_gradients: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Gradients, ...]:
        mine = self.operations[1].op_backward(contexts[1], dy, extra_gradients[1])
        if mine.input is None:
            return Gradients(None), mine
        extra = extra_gradients[0][0]
        # a gradient that is part of a graph, under create_graph, cannot be written to
        return Gradients(mine.input + extra if torch.is_grad_enabled() else mine.input.add_(extra)), mine


FUSIONS: list[type[FusedOperation]] = [
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    ForwardGroupedMLP,
    BackwardLinearAdd,
]
"""What the fuser looks for; of two that fit at a place it takes the longer one, then the earlier."""
