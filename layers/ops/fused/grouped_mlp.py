"""The experts' MLP as one forward step."""

from __future__ import annotations

from collections.abc import Sequence

from ..basic import ActivationOperation, GroupedLinear, ScaledGLU
from ..call import Computed, Input, OperationCall
from ..operation import BasicOperation, FusedOperation
from .fitting import begins_with


class ForwardGroupedMLP(FusedOperation):
    """Grouped linear, activation, grouped linear: the rows are located once where both take the same splits."""

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        between = (ActivationOperation, ScaledGLU)
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
