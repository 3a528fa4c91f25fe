"""Quantization as an operation."""

from __future__ import annotations

from torch import Tensor

from ...functional.linear import largest
from ...module.base import QuantizedModule
from ...quantizer.delayed import update_amax_
from ...quantizer.state import QuantizerState, value_of, with_state
from ...recipe.base import HIGH_PRECISION
from ...tensor.storage import STORAGE_CLASSES
from ..call import Computed, Gradients, Input, OperationArguments, OperationCall, OperationContext, QuantizedRows
from ..operation import BasicOperation


class Quantize(QuantizedModule, BasicOperation):
    """Quantize [..., C] as the input of a GEMM under the recipe in force; without one, calibrate at most.

    The next operation takes the quantized data if it can; at the end of a group the result is a quantized tensor, which
    has to be a matrix. The gradient passes unchanged. Under `torch.compile` let the operation that uses
    the data follow in the same `Sequential`: a quantized tensor can enter or leave a graph, but its gradient cannot,
    and the compiler does not see the quantizer of one that was made between two groups of the same graph.
    """

    TAKES_QUANTIZED = True

    def weight_names(self) -> tuple[str, ...]:
        return ()

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        quantizers = self.quantizers()
        live = self.live_state(quantizers or HIGH_PRECISION)
        recorded = self.calibration_amax("input", 0) if self.calibrating() else None
        return OperationArguments((), (recorded, *live), None if quantizers is None else quantizers.input)

    def op_forward_compute(self, x: Input, call: OperationCall) -> Computed:
        recorded, *tensors = call.tensors
        if recorded is not None and isinstance(x, Tensor):
            update_amax_(recorded, largest(x.reshape(-1, x.shape[-1])))
        if call.constants is None or isinstance(x, QuantizedRows):
            return Computed(x)
        state = QuantizerState(*tensors)
        quantizer = with_state(call.constants, state.scale, state.amax, "input", 0)
        value = value_of(quantizer)
        rows = x.reshape(-1, x.shape[-1])
        storage = STORAGE_CLASSES[value.FORMAT](quantizer.quantize_fields(rows), value, rows.shape, x.dtype)
        return Computed(QuantizedRows(storage, x.shape))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Input, computed: Computed, call: OperationCall) -> None:
        """Nothing is needed."""

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy)
