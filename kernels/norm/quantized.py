"""Norms for callers that run their own backward pass, who can have the result as FP8.

On CPU the result is the norm's, then quantized, fused by Inductor, and the backward pass is the derivative of the
reference with recomputed statistics; on an accelerator each is one op, and the second reads the statistics of the
first.

Nothing here is differentiable, FP8 having no gradients: who uses the result keeps x and the statistics that come along
and calls `norm_bwd`. T rows, H columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import definitions_only
from ..custom_op import FLOATS, Output, flatten, matrix_like, operation, takes
from ..derivative import gradients_of
from ..launch import as_matrix
from ..quantize.output import QuantizedOutput
from . import op, reference


def _results(x: Tensor, centered: bool, output: QuantizedOutput) -> list[Output]:
    copies = output.results(matrix_like(x))
    return [*copies, *op.statistics(x, centered)]


_TAKES = takes(
    f"x: {FLOATS} [..., H]; weight: {FLOATS} [H]?; bias: {FLOATS} [H]?; scale: float32?;"
    "scale is None or scale.numel() == 1"
)


@operation("norm_quantized", _results, takes=_TAKES)
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
    if x.device.type == "cuda" and not definitions_only() and not _TAKES.misfit(x, weight, None, scale):
        flags = (False, zero_centered, cast_order == "weight_last")
        *copies, _, rstd = norm_quantized(x, weight, None, eps, *flags, scale, *flatten(output))
        return [*copies, rstd]
    y = op.eager_rms_norm(x, weight, eps, zero_centered=zero_centered, cast_order=cast_order)
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
    if x.device.type == "cuda" and not definitions_only() and not _TAKES.misfit(x, weight, bias, scale):
        flags = (True, zero_centered, cast_order == "weight_last")
        return norm_quantized(x, weight, bias, eps, *flags, scale, *flatten(output))
    y = reference.layer_norm(x, weight, bias, eps, zero_centered=zero_centered, cast_order=cast_order)
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    return [*output.define(as_matrix(y), scale), mean, torch.rsqrt(variance + eps)]


@dataclass(frozen=True)
class Norm:
    """Which norm. centered: LayerNorm, else RMSNorm; the rest as for `rms_norm` and `layer_norm`."""

    centered: bool
    eps: float
    zero_centered: bool
    cast_order: str

    def _reference(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        options = {"zero_centered": self.zero_centered, "cast_order": self.cast_order}
        if self.centered:
            return reference.layer_norm(x, weight, bias, self.eps, **options)
        return op.eager_rms_norm(x, weight, self.eps, **options)

    def _flags(self) -> tuple[bool, bool, bool]:
        return self.centered, self.zero_centered, self.cast_order == "weight_last"

    def of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the norm of x [..., H], differentiable."""
        # not `__call__`: torch 2.11 hashes a called object that a compiled function makes, before it has its fields
        options = {"zero_centered": self.zero_centered, "cast_order": self.cast_order}
        if self.centered:
            return op.layer_norm(x, weight, bias, self.eps, **options)
        return op.rms_norm(x, weight, self.eps, **options)

    def output_dtype(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
        """Return the dtype of the result."""
        return op.output_dtype(x, weight, bias, self.cast_order == "weight_last")

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the norm of x [..., H] and what `backward` wants of it. weight, bias: [H] or None."""
        if x.device.type == "cuda" and not definitions_only() and not op.TAKES.misfit(x, weight, bias):
            centered, zero_centered, weight_last = self._flags()
            y, mean, rstd = op.norm_fwd(x, weight, bias, self.eps, centered, zero_centered, weight_last)
            return y, (mean, rstd)
        return self._reference(x, weight, bias), ()

    def forward_quantized(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, output: QuantizedOutput, scale: Tensor | None
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the norm as `output` says, of x as a matrix, and what `backward` wants of it."""
        options = {"zero_centered": self.zero_centered, "cast_order": self.cast_order}
        if self.centered:
            *copies, mean, rstd = layer_norm_quantized(x, weight, bias, self.eps, output, scale, **options)
        else:
            *copies, rstd = rms_norm_quantized(x, weight, self.eps, output, scale, **options)
            mean = rstd.new_empty(0)
        triton = x.device.type == "cuda" and not definitions_only() and not op.TAKES.misfit(x, weight, bias)
        return copies, (mean, rstd) if triton else ()

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: tuple[Tensor, ...],
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias. needs: whether the last two are wanted."""
        if statistics:
            wanted = [p.dtype if p is not None and n else None for p, n in zip((weight, bias), needs, strict=True)]
            dx, dw, db = op.norm_bwd(dy, x, weight, *statistics, *self._flags(), *wanted)
            return dx, dw if wanted[0] else None, db if wanted[1] else None
        present = [p for p in (weight, bias) if p is not None]

        def run(x: Tensor, *parameters: Tensor) -> Tensor:
            left = iter(parameters)
            return self._reference(x, *(None if p is None else next(left) for p in (weight, bias)))

        dx, *gradients = gradients_of(run, (x, *present), dy)
        found = iter(gradients)
        dw, db = (None if p is None else next(found) for p in (weight, bias))
        return dx, dw if needs[0] else None, db if needs[1] else None
