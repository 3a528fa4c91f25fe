"""A norm as a forward and a backward pass, for callers that run their own backward pass.

They can have the result as FP8, through which autograd cannot go. On CPU the backward pass is the derivative of the
reference, which recomputes the statistics; on an accelerator a kernel reads those that the forward pass wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..derivative import gradients_of
from ..quantize.output import QuantizedOutput
from . import op, quantized, reference


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
        return reference.rms_norm(x, weight, self.eps, **options)

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
        if x.device.type == "cuda":
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
            *copies, mean, rstd = quantized.layer_norm_quantized(x, weight, bias, self.eps, output, scale, **options)
        else:
            *copies, rstd = quantized.rms_norm_quantized(x, weight, self.eps, output, scale, **options)
            mean = rstd.new_empty(0)
        return copies, (mean, rstd) if x.device.type == "cuda" else ()

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: tuple[Tensor, ...],
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias. needs: whether those of the weight and of the bias are wanted."""
        if statistics:
            wanted = [p.dtype if p is not None and n else None for p, n in zip((weight, bias), needs, strict=True)]
            dx, dw, db = op.norm_bwd(dy, x, weight, *statistics, *self._flags(), *wanted)
            return dx, dw if wanted[0] else None, db if wanted[1] else None
        given = [p for p in (weight, bias) if p is not None]

        def run(x: Tensor, *parameters: Tensor) -> Tensor:
            left = iter(parameters)
            return self._reference(x, *(None if p is None else next(left) for p in (weight, bias)))

        dx, *gradients = gradients_of(run, (x, *given), dy)
        found = iter(gradients)
        dw, db = (None if p is None else next(found) for p in (weight, bias))
        return dx, dw if needs[0] else None, db if needs[1] else None
