"""Activations, plain and gated."""

import torch
from torch import Tensor

from te_models.kernels.activation import Activation
from te_models.kernels.without_autocast import autocast_dtype

from ....gemm.prologue import fused_output, fused_storage
from ...arguments import takes_at_default
from ..call import Computed, Gradients, Input, OperationArguments, OperationCall, OperationContext, QuantizedRows
from ..operation import BasicOperation


class ActivationOperation(BasicOperation):
    """Base of activations. x: [..., F], or gate and up side by side, [..., 2 F], for a gated one; the result: [..., F].

    Where the next operation is a GEMM under a recipe, the result is handed over quantized.
    """

    activation: Activation
    glu_interleave_size: int | None = None

    @takes_at_default(cache_quantized_input=False)
    def __init__(self) -> None:
        super().__init__()

    def gate_and_up(self, x: Tensor) -> Tensor:
        """Return the input as `activation` takes it."""
        return x if self.glu_interleave_size is None else _halves_of_blocks(x, self.glu_interleave_size)

    def as_given(self, dx: Tensor) -> Tensor:
        """Turn the gradient of `gate_and_up`'s result into the gradient of its input."""
        return dx if self.glu_interleave_size is None else _blocks_of_halves(dx, self.glu_interleave_size)

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        return OperationArguments(constants=autocast_dtype(device_type))

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(activated(self.activation, self.gate_and_up(x), None, call), (x,))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        (x,) = ctx.saved
        return Gradients(self.as_given(self.activation.backward(dy, self.gate_and_up(x))[0]))

    def extra_repr(self) -> str:
        a, size = self.activation, self.glu_interleave_size
        clamped = "" if a.clamp is None else f"limit={a.clamp}, alpha={a.alpha}, glu_linear_offset={a.up_offset}"
        return ", ".join(filter(None, (clamped, "" if size is None else f"glu_interleave_size={size}")))


class GatedActivation(ActivationOperation):
    """Base of gated activations. glu_interleave_size: gate and up of x alternate in blocks of this many columns, None:
    all of the gate comes first. ValueError for a size below 1, and where x is no whole number of pairs of blocks."""

    @takes_at_default(cache_quantized_input=False)
    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        self.glu_interleave_size = _checked_size(glu_interleave_size)


def _checked_size(size: int | None) -> int | None:
    if size is not None and size < 1:
        raise ValueError(f"glu_interleave_size is {size}; allowed: a positive number of columns, or None")
    return size


def _halves_of_blocks(x: Tensor, size: int) -> Tensor:
    """[a0 b0 a1 b1 ...], blocks of `size` columns -> [a0 a1 ... b0 b1 ...]."""
    if x.shape[-1] % (2 * size):
        raise ValueError(
            f"the input has {x.shape[-1]} columns; allowed with glu_interleave_size {size}: a multiple of {2 * size}"
        )
    return x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).reshape(x.shape)


def _blocks_of_halves(x: Tensor, size: int) -> Tensor:
    """Undo `_halves_of_blocks`."""
    return x.unflatten(-1, (2, -1, size)).transpose(-3, -2).reshape(x.shape)


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

    activation = Activation("gelu_tanh")


class ReLU(ActivationOperation):
    """`max(x, 0)`."""

    activation = Activation("relu")


class SReLU(ActivationOperation):
    """`max(x, 0)^2`."""

    activation = Activation("squared_relu")


class SiLU(ActivationOperation):
    """`x sigmoid(x)`."""

    activation = Activation("silu")


class QGELU(ActivationOperation):
    """`x sigmoid(1.702 x)`, the quick approximation of GELU."""

    activation = Activation("quick_gelu")


class GLU(GatedActivation):
    """`sigmoid(gate) * up`."""

    activation = Activation("sigmoid", gated=True)


class GEGLU(GatedActivation):
    """`gelu(gate) * up`."""

    activation = Activation("gelu_tanh", gated=True)


class QGEGLU(GatedActivation):
    """`gate sigmoid(1.702 gate) * up`."""

    activation = Activation("quick_gelu", gated=True)


class ReGLU(GatedActivation):
    """`relu(gate) * up`."""

    activation = Activation("relu", gated=True)


class SReGLU(GatedActivation):
    """`max(gate, 0)^2 * up`."""

    activation = Activation("squared_relu", gated=True)


class SwiGLU(GatedActivation):
    """`silu(gate) * up`."""

    activation = Activation("silu", gated=True)


def _clamped(limit: float, alpha: float, glu_linear_offset: float) -> Activation:
    return Activation("silu", gated=True, clamp=limit, alpha=alpha, up_offset=glu_linear_offset)


class ClampedSwiGLU(GatedActivation):
    """`gate sigmoid(alpha gate) (up + glu_linear_offset)` of gate <= limit, |up| <= limit, as gpt-oss has it."""

    @takes_at_default(cache_quantized_input=False)
    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size)
        self.activation = _clamped(limit, alpha, glu_linear_offset)


class ScaledActivation(ActivationOperation):
    """Base of activations times a probability of each row, for experts. Extra input: probabilities [...], one for each
    row of the input [..., F or 2 F]; ValueError for another shape."""

    NUM_EXTRA_INPUTS = 1

    @takes_at_default(activation_recompute_in_mlp=False)
    def __init__(self) -> None:
        super().__init__()

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        (probabilities,) = call.extra_inputs
        if probabilities.shape != x.shape[:-1]:
            raise ValueError(
                f"probabilities have shape {tuple(probabilities.shape)}; allowed with an input of shape "
                f"{tuple(x.shape)}: {tuple(x.shape[:-1])}"
            )
        return Computed(activated(self.activation, self.gate_and_up(x), probabilities, call), (x, probabilities))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        x, probabilities = ctx.saved
        wanted = ctx.needs.extra_inputs[0]
        dx, dp = self.activation.backward(dy, self.gate_and_up(x), probabilities, wanted)
        return Gradients(self.as_given(dx), extra_inputs=(dp,))


class ScaledSReLU(ScaledActivation):
    """`max(x, 0)^2 * probability`."""

    activation = Activation("squared_relu")


class ScaledGLU(ScaledActivation):
    """Base of gated activations times a probability of each row. glu_interleave_size: see `GatedActivation`."""

    @takes_at_default(activation_recompute_in_mlp=False)
    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        self.glu_interleave_size = _checked_size(glu_interleave_size)


class ScaledSwiGLU(ScaledGLU):
    """`silu(gate) * up * probability`."""

    activation = Activation("silu", gated=True)


class ScaledGEGLU(ScaledGLU):
    """`gelu(gate) * up * probability`."""

    activation = Activation("gelu_tanh", gated=True)


class ScaledClampedQGeGLU(ScaledGLU):
    """`ClampedSwiGLU` times the probability of each row; the arguments: see there."""

    @takes_at_default(activation_recompute_in_mlp=False)
    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(glu_interleave_size)
        self.activation = _clamped(limit, alpha, glu_linear_offset)
