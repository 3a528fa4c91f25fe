"""The norm or the activation before a dense layer, as its prologue.

On an accelerator one kernel makes its result and quantizes it for the GEMM (see `fused_quantize`), so the result never
reaches memory in high precision. Backward recomputes nothing: wgrad reads the quantized copy, and the derivative of the
prologue reads its own input. The numbers are those of the two apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_models.kernels.activation import Activation
from te_models.kernels.norm import Norm
from te_models.kernels.quantize import QuantizedOutput


class Prologue(NamedTuple):
    """What runs before the GEMM. weight, bias: the parameters of a norm, [H] or None."""

    function: Norm | Activation
    weight: Tensor | None = None
    bias: Tensor | None = None

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the result."""
        return self.function.output_dtype(x, self.weight, self.bias) if isinstance(self.function, Norm) else x.dtype

    def run(self, x: Tensor) -> Tensor:
        """Return the result, differentiable: x: [..., H] -> [..., H], for a gated activation [..., 2 H] -> [..., H]."""
        if isinstance(self.function, Norm):
            return self.function.of(x, self.weight, self.bias)
        return self.function.forward(x)

    def run_quantized(
        self, x: Tensor, output: QuantizedOutput, scale: Tensor | None
    ) -> tuple[list[Tensor], tuple[Tensor, ...], tuple[int, ...]]:
        """Return (the copies that `output` describes, what `gradients` wants, the shape of the result)."""
        function = self.function
        if isinstance(function, Norm):
            return *function.forward_quantized(x, self.weight, self.bias, output, scale), tuple(x.shape)
        width = x.shape[-1] // 2 if function.gated else x.shape[-1]
        return function.forward_quantized(x, None, output, scale), (), (*x.shape[:-1], width)

    def gradients(
        self, dy: Tensor, x: Tensor, statistics: tuple[Tensor, ...], needs: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias. needs: whether those of the weight and of the bias are wanted."""
        if isinstance(self.function, Norm):
            return self.function.backward(dy, x, self.weight, self.bias, statistics, needs)
        return self.function.backward(dy, x)[0], None, None
