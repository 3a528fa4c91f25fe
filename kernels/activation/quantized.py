"""Activations whose result is FP8: on CPU activation and then quantization, fused by Inductor; else one registered op.

Not differentiable, FP8 having no gradients: who uses the result keeps x and calls `activation_bwd`.
"""

from __future__ import annotations

from torch import Tensor

from ..custom_op import Output, flatten, matrix_like, operation
from ..launch import as_matrix
from ..quantize.output import QuantizedOutput
from . import reference
from .op import check_name, flat

__all__ = ["activation_quantized", "activation_quantized_op", "gated_activation_quantized"]


def _copies(x: Tensor, gated: bool, output: QuantizedOutput) -> list[Output]:
    return output.results(matrix_like(x, x.shape[-1] // 2 if gated else None))


@operation("activation_quantized", _copies)
def activation_quantized_op(
    x: Tensor,
    probabilities: Tensor | None,
    name: str,
    gated: bool,
    clamp: float | None,
    alpha: float,
    up_offset: float,
    scale: Tensor | None,
    output: QuantizedOutput,
) -> list[Tensor]:
    """Return what `QuantizedOutput.define` says of the result of `activation_fwd` as a matrix [T, F]."""
    from . import triton_quantized

    options = (name, gated, clamp, alpha, up_offset)
    return triton_quantized.activation_quantized(as_matrix(x), flat(probabilities), *options, scale, output)


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
    output.check_scale(scale)
    if x.device.type == "cuda":
        return activation_quantized_op(x, probabilities, name, False, None, 1.0, 0.0, scale, *flatten(output))
    return output.define(as_matrix(reference.activation(x, name, probabilities=probabilities)), scale)


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
    output.check_scale(scale)
    if x.device.type == "cuda":
        options = (name, True, clamp, alpha, up_offset)
        return activation_quantized_op(x, probabilities, *options, scale, *flatten(output))
    options = {"clamp": clamp, "alpha": alpha, "up_offset": up_offset, "probabilities": probabilities}
    return output.define(as_matrix(reference.gated_activation(x, name, **options)), scale)
