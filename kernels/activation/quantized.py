"""Activations for callers that run their own backward pass, who can have the result as FP8.

On CPU the result is the activation's, then quantized, fused by Inductor, and the backward pass the derivative of the
reference; on an accelerator each is one registered op.

Not differentiable, FP8 having no gradients: who uses the result keeps x and calls `activation_bwd`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backend import definitions_only
from ..compiling import compiling
from ..custom_op import FLOATS, Output, flatten, matrix_like, operation, takes
from ..derivative import gradients_of
from ..launch import as_matrix
from ..quantize.fp8.cpu import fp8_to_float
from ..quantize.output import QuantizedOutput
from ..torch_versions import own_result, saturating_cast
from . import op, reference
from .op import check_name, flat_probabilities
from .reference import ActivationKind


def _copies(x: Tensor, kind: ActivationKind, output: QuantizedOutput) -> list[Output]:
    return output.results(matrix_like(x, x.shape[-1] // 2 if kind.gated else None))


_TAKES = takes(
    f"x: {FLOATS} [*B, F]; probabilities: {FLOATS} [*B]?; kind: value; scale: float32?; not kind.gated or F % 2 == 0;"
    "scale is None or scale.numel() == 1"
)


@operation("activation_quantized", _copies, takes=_TAKES)
def activation_quantized_op(
    x: Tensor, probabilities: Tensor | None, kind: ActivationKind, scale: Tensor | None, output: QuantizedOutput
) -> list[Tensor]:
    """Return what `QuantizedOutput.define` says of the result of `activation_fwd` as a matrix [T, F]."""
    from . import triton_quantized

    return triton_quantized.activation_quantized(as_matrix(x), flat_probabilities(probabilities), kind, scale, output)


def activation_quantized(
    x: Tensor,
    name: str,
    output: QuantizedOutput,
    scale: Tensor | None = None,
    *,
    probabilities: Tensor | None = None,
) -> list[Tensor]:
    """Return `activation` of x [..., F] as FP8: what `output.define` returns of it as a matrix.

    scale: float32 scalar, where the output has one for all; the other arguments: see `activation`. Raises ValueError
    for another name, or where the scale does not fit the output.
    """
    check_name(name)
    return _quantized(x, ActivationKind(name), output, scale, probabilities)


def gated_activation_quantized(
    x: Tensor,
    name: str,
    output: QuantizedOutput,
    scale: Tensor | None = None,
    *,
    clamp: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    probabilities: Tensor | None = None,
) -> list[Tensor]:
    """Return `gated_activation` of x [..., 2F] as FP8; see there and `activation_quantized`."""
    check_name(name)
    return _quantized(x, ActivationKind(name, True, clamp, alpha, up_offset), output, scale, probabilities)


def _quantized(
    x: Tensor, kind: ActivationKind, output: QuantizedOutput, scale: Tensor | None, probabilities: Tensor | None
) -> list[Tensor]:
    output.check_scale(scale)
    if x.device.type == "cuda" and not definitions_only() and not _TAKES.misfit(x, probabilities, kind, scale):
        return activation_quantized_op(x, probabilities, *kind, scale, *flatten(output))
    return output.define(as_matrix(op.in_one_pass(x, kind, probabilities)), scale)


@dataclass(frozen=True)
class Activation:
    """Which activation; the fields are the arguments of `activation` and `gated_activation`.

    fp8_input_store: keep the input as E4M3 for the backward pass and compute the derivative from it, as
    Megatron-Core's activation_func_fp8_input_store does; the result is of the input itself.
    """

    name: str
    gated: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    fp8_input_store: bool = False

    def __post_init__(self) -> None:
        op.check_name(self.name)

    def _kind(self) -> ActivationKind:
        return ActivationKind(self.name, self.gated, self.clamp, self.alpha, self.up_offset)

    def forward(self, x: Tensor, probabilities: Tensor | None = None) -> Tensor:
        """Return the activation of x [..., F], or of [gate | up] [..., 2F]; times probabilities [...], if given.

        Differentiable, with fp8_input_store once (else RuntimeError).
        """
        if self.fp8_input_store and torch.is_grad_enabled():
            return _OfStoredInput.apply(x, probabilities, self)
        return self._forward(x, probabilities)

    def _forward(self, x: Tensor, probabilities: Tensor | None) -> Tensor:
        return op.activated_by_kind(x, self._kind(), probabilities)

    def stored(self, x: Tensor) -> Tensor:
        """Return what is stored of an input for `backward`."""
        return saturating_cast(x, torch.float8_e4m3fn) if self.fp8_input_store else x

    def restored(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of `backward` from what `stored` returned of one of this dtype."""
        return fp8_to_float(stored).to(dtype) if self.fp8_input_store else stored

    def forward_quantized(
        self, x: Tensor, probabilities: Tensor | None, output: QuantizedOutput, scale: Tensor | None
    ) -> list[Tensor]:
        """Return the activation as `output` says, as a matrix."""
        return _quantized(x, self._kind(), output, scale, probabilities)

    def backward(
        self, dy: Tensor, x: Tensor, probabilities: Tensor | None = None, needs_probabilities: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and, if they are wanted, of the probabilities."""
        kind = self._kind()
        if x.device.type == "cuda" and not definitions_only():
            dx, dp = op.activation_bwd(dy, x, probabilities, *kind, needs_probabilities)
            return dx, None if probabilities is None or not needs_probabilities else dp.to(probabilities.dtype)
        if probabilities is not None and needs_probabilities:
            dx, dp = gradients_of(lambda x, factor: reference.activate(x, kind, factor), (x, probabilities), dy)
            return dx, dp
        (dx,) = gradients_of(lambda x: reference.activate(x, kind, probabilities), (x,), dy)
        return dx, None


class _OfStoredInput(torch.autograd.Function):
    """`Activation.forward` of which the backward pass has the input in E4M3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probabilities: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(activation.stored(x), probabilities)
        ctx.activation, ctx.dtype = activation, x.dtype
        return own_result(activation._forward(x, probabilities))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if torch.is_grad_enabled() and not compiling():
            raise RuntimeError("an activation that keeps its input in FP8 (fp8_input_store) has no second derivative")
        stored, probabilities = ctx.saved_tensors
        x = ctx.activation.restored(stored, ctx.dtype)
        dx, dp = ctx.activation.backward(dy, x, probabilities, ctx.needs_input_grad[1])
        return dx, dp, None
