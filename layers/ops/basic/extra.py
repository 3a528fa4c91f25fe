"""Operations with a tensor besides the one that runs through: residual branches join and leave here."""

from __future__ import annotations

from torch import Tensor

from ..call import Computed, Gradients, OperationCall, OperationContext
from ..operation import BasicOperation


class AddExtraInput(BasicOperation):
    """`y = x + extra`. Transformer Engine: `te.ops.AddExtraInput`."""

    NUM_EXTRA_INPUTS = 1

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        (extra,) = call.extra_inputs
        return Computed(x + extra.to(x.dtype))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.constants = call.extra_inputs[0].dtype

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy, extra_inputs=(dy.to(ctx.constants) if ctx.needs.extra_inputs[0] else None,))


class MakeExtraOutput(BasicOperation):
    """`y = x`, and x is an extra output, too. Transformer Engine: `te.ops.MakeExtraOutput`."""

    NUM_EXTRA_OUTPUTS = 1

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(x, extra_outputs=(x,))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        """Nothing is needed."""

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy + extra_gradients[0])
