"""Norms whose result is FP8: on CPU the norm and then the quantization, fused by Inductor; on an accelerator one op.

Nothing here is differentiable, FP8 having no gradients: who uses the result keeps x and the statistics that come along
and calls `norm_bwd`. T rows, H columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_op import Output, flatten, matrix_like, operation
from ..launch import as_matrix
from ..quantize.output import QuantizedOutput
from . import op, reference

__all__ = ["layer_norm_quantized", "norm_quantized", "rms_norm_quantized"]


def _results(x: Tensor, centered: bool, output: QuantizedOutput) -> list[Output]:
    copies = output.results(matrix_like(x))
    return [*copies, *op.statistics(x, centered)]


@operation("norm_quantized", _results)
def norm_quantized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    zero_centered: bool,
    weight_last: bool,
    scale: Tensor | None,
    output: QuantizedOutput,
) -> list[Tensor]:
    """Return what `QuantizedOutput.define` says of `norm_fwd`'s y as a matrix; then its mean and rstd."""
    from . import triton_quantized

    flags = (centered, zero_centered, weight_last, op.output_dtype(x, weight, bias, weight_last))
    copies, mean, rstd = triton_quantized.norm_quantized(as_matrix(x), weight, bias, eps, *flags, scale, output)
    lead = x.shape[:-1]
    return [*copies, mean.view(lead) if centered else mean, rstd.view(lead)]


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    output: QuantizedOutput,
    scale: Tensor | None = None,
    *,
    zero_centered: bool = False,
    cast_order: str = "weight_last",
) -> list[Tensor]:
    """Return `rms_norm` of x [..., H] as FP8: what `output.define` returns of it as a matrix, then rstd, float32 [...].

    scale: float32 scalar, where the output has one for all; the other arguments: see `rms_norm`. Raises ValueError
    where the scale does not fit the output.
    """
    output.check_scale(scale)
    if x.device.type == "cuda":
        flags = (False, zero_centered, cast_order == "weight_last")
        *copies, _, rstd = norm_quantized(x, weight, None, eps, *flags, scale, *flatten(output))
        return [*copies, rstd]
    y = reference.rms_norm(x, weight, eps, zero_centered=zero_centered, cast_order=cast_order)
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    return [*output.define(as_matrix(y), scale), rstd]


def layer_norm_quantized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output: QuantizedOutput,
    scale: Tensor | None = None,
    *,
    zero_centered: bool = False,
    cast_order: str = "weight_first",
) -> list[Tensor]:
    """Return `layer_norm` of x [..., H] as FP8, then its mean and rstd, float32 [...]; see `rms_norm_quantized`."""
    output.check_scale(scale)
    if x.device.type == "cuda":
        flags = (True, zero_centered, cast_order == "weight_last")
        return norm_quantized(x, weight, bias, eps, *flags, scale, *flatten(output))
    y = reference.layer_norm(x, weight, bias, eps, zero_centered=zero_centered, cast_order=cast_order)
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    return [*output.define(as_matrix(y), scale), mean, torch.rsqrt(variance + eps)]
