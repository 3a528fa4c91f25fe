"""Activations, plain and gated."""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.activation import Activation

from ...functional.fused_quantize import fused_output, fused_storage
from ...functional.gemm_operand import autocast_dtype
from ..call import Computed, Gradients, Input, OperationArguments, OperationCall, OperationContext, QuantizedRows
from ..operation import BasicOperation


class ActivationOperation(BasicOperation):
    """Base of activations. x: [..., F], or gate and up side by side, [..., 2 F], for a gated one; the result: [..., F].

    Where the next operation is a GEMM under a recipe, the result is handed over quantized.
    """

    ACTIVATION: Activation

    @property
    def activation(self) -> Activation:
        """Which activation this is."""
        return self.ACTIVATION

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        return OperationArguments(constants=autocast_dtype(device_type))

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(activated(self.activation, x, None, call), (x,))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        (x,) = ctx.saved
        return Gradients(self.activation.backward(dy, x)[0])


def activated(activation: Activation, x: Tensor, probabilities: Tensor | None, call: OperationCall) -> Input:
    """Return the activation of x, quantized if the next operation takes it so."""
    fused = fused_output(call.next_input, x.dtype, call.constants or x.dtype)
    if fused is None or call.next_input is None:
        return activation.forward(x, probabilities)
    shape = (*x.shape[:-1], x.shape[-1] // 2) if activation.gated else x.shape
    copies = activation.forward_quantized(x, probabilities, *fused)
    return QuantizedRows(fused_storage(call.next_input, copies, shape, x.dtype), torch.Size(shape))


class GELU(ActivationOperation):
    """GELU with the tanh approximation."""

    ACTIVATION = Activation("gelu_tanh")


class ReLU(ActivationOperation):
    """`max(x, 0)`."""

    ACTIVATION = Activation("relu")


class SReLU(ActivationOperation):
    """`max(x, 0)^2`."""

    ACTIVATION = Activation("squared_relu")


class SiLU(ActivationOperation):
    """`x sigmoid(x)`."""

    ACTIVATION = Activation("silu")


class GEGLU(ActivationOperation):
    """`gelu(gate) * up`."""

    ACTIVATION = Activation("gelu_tanh", gated=True)


class ReGLU(ActivationOperation):
    """`relu(gate) * up`."""

    ACTIVATION = Activation("relu", gated=True)


class SReGLU(ActivationOperation):
    """`max(gate, 0)^2 * up`."""

    ACTIVATION = Activation("squared_relu", gated=True)


class SwiGLU(ActivationOperation):
    """`silu(gate) * up`."""

    ACTIVATION = Activation("silu", gated=True)


class ClampedSwiGLU(ActivationOperation):
    """`gate sigmoid(alpha gate) (up + up_offset)` of gate <= limit, |up| <= limit, as gpt-oss has it."""

    def __init__(self, limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0) -> None:
        super().__init__()
        self._clamped = Activation("silu", gated=True, clamp=limit, alpha=alpha, up_offset=up_offset)

    @property
    def activation(self) -> Activation:
        return self._clamped

    def extra_repr(self) -> str:
        return f"limit={self._clamped.clamp}, alpha={self._clamped.alpha}, up_offset={self._clamped.up_offset}"


class ScaledGLU(BasicOperation):
    """Base of gated activations times a probability of each row, for experts. Extra input: probabilities [...], one
    for each row of the input [..., 2 F]; ValueError for another shape."""

    NUM_EXTRA_INPUTS = 1
    ACTIVATION: Activation

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        return OperationArguments(constants=autocast_dtype(device_type))

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        (probabilities,) = call.extra_inputs
        if probabilities.shape != x.shape[:-1]:
            raise ValueError(
                f"probabilities have shape {tuple(probabilities.shape)}; allowed with an input of shape "
                f"{tuple(x.shape)}: {tuple(x.shape[:-1])}"
            )
        return Computed(activated(self.ACTIVATION, x, probabilities, call), (x, probabilities))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        x, probabilities = ctx.saved
        dx, dp = self.ACTIVATION.backward(dy, x, probabilities, ctx.needs.extra_inputs[0])
        return Gradients(dx, extra_inputs=(dp,))


class ScaledSwiGLU(ScaledGLU):
    """`silu(gate) * up * probability`."""

    ACTIVATION = Activation("silu", gated=True)


class ScaledGEGLU(ScaledGLU):
    """`gelu(gate) * up * probability`."""

    ACTIVATION = Activation("gelu_tanh", gated=True)
