"""Quantizing a GEMM's input as the last step of the norm or activation before it, and deciding where that is done.

A dense layer may have that norm or activation as its `Prologue`: on an accelerator one kernel computes the result and
quantizes it for the GEMM. Backward recomputes nothing: wgrad reads the quantized copy, and the derivative of the
prologue reads its own input. The numbers equal the high-precision result, rounded to its dtype and then quantized.
Fusing therefore changes no bit, and the high-precision result never reaches memory.

Two cases are not fused. Current scaling and NVFP4 scale by the largest magnitude of the whole result, so the whole
result has to be there first. Rows sorted by expert are quantized group by group, each padded to whole blocks, in a
separate layout; so an activation between grouped GEMMs makes plain rows under every recipe.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.activation import Activation
from te_models.kernels.compiling import compiling
from te_models.kernels.norm import Norm
from te_models.kernels.quantize import QuantizedOutput

from ..quantizer import Quantizer
from ..quantizer.state import AnyQuantizer, value_of
from ..recipe.base import GemmQuantizers
from ..recipe.context import state as active
from ..tensor.formats import TENSOR_CLASSES
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage, storage_of
from .product import in_cpu_graph
from .scaling import Scaling


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
        """Return the gradients of x, weight and bias. needs: whether the latter two are wanted."""
        if isinstance(self.function, Norm):
            return self.function.backward(dy, x, self.weight, self.bias, statistics, needs)
        return self.function.backward(dy, x)[0], None, None


def input_quantizer(scaling: Scaling, needs_wgrad: bool, device: torch.device) -> AnyQuantizer | None:
    """Return the quantizer that may quantize a GEMM's input in its place; None where the input is wanted as it is: for
    an unquantized backward pass, for statistics, or in a CPU graph, where a GEMM takes dequantized values."""
    (quantizers, options, _), state = scaling
    override = quantizers.backward_override
    if override == "high_precision" or state.statistics is not None or active().calibrating or in_cpu_graph(device):
        return None
    if needs_wgrad and options.save_original_input and override is None:
        return None
    quantizer = scaling.for_input(records=True)
    columnwise = needs_wgrad and override is None
    if quantizer is not quantizers.input or (quantizers.input.rowwise and quantizers.input.columnwise == columnwise):
        return quantizer
    if compiling():
        # a graph cannot make a new quantizer: one copy too many, or the plain result
        return quantizer if quantizers.input.rowwise and quantizers.input.columnwise else None
    return quantizers.input.with_usage(rowwise=True, columnwise=columnwise)


def readable_as_input(quantizer: Quantizer, quantizers: GemmQuantizers, needs_wgrad: bool) -> bool:
    """Whether GEMMs may read an input that `quantizer` has quantized already: its numbers are those that the input
    quantizer would make, and the copies are there that this pass reads. Any other input has to be dequantized: the
    backward pass reads it as the recipe's, and blocks or a transform that differ would give numbers of no meaning."""
    columnwise = needs_wgrad and quantizers.backward_override is None
    same = quantizers.input.same_numbers(quantizer)
    return same and (quantizer.symmetric or (quantizer.rowwise and (quantizer.columnwise or not columnwise)))


def fused_output(
    quantizer: AnyQuantizer | None, dtype: torch.dtype, wanted: torch.dtype
) -> tuple[QuantizedOutput, Tensor | None] | None:
    """Return (what an operation has to make, with which scale) for the next one; None: a plain result.

    dtype: of the plain result; wanted: what the next one computes in. A rounding in between cannot be fused.
    """
    output = None if quantizer is None or dtype != wanted else quantizer.output()
    return None if output is None else (output, getattr(quantizer, "scale", None))


def fused_storage(
    quantizer: AnyQuantizer, copies: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
) -> QuantizedStorage:
    """Return what an operation made for `fused_output`, as the next one's input, a matrix. shape, dtype: of the plain
    result [..., C]."""
    value = value_of(quantizer)
    matrix = torch.Size((torch.Size(shape[:-1]).numel(), shape[-1]))
    return storage_of(quantizer.fields_of_output(copies), value, matrix, dtype)


def quantized_output(y: Tensor, quantizer: AnyQuantizer) -> QuantizedTensor:
    """Return y: [..., C] quantized rowwise, in its shape; the gradient passes unchanged."""
    if isinstance(quantizer, Quantizer):
        quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
    return _QuantizedOutput.apply(y, quantizer)


def quantized_gradient(
    x: Tensor, quantizer: Quantizer, key: Tensor | None, live: Callable[[], AnyQuantizer] | None
) -> Tensor:
    """Return x [..., C], whose gradient comes as a tensor that `quantizer` makes. live: returns what to quantize with
    when the backward pass runs; None: `quantizer`; key: of this pass, for stochastic rounding."""
    if key is not None:
        key = torch.stack((key[0] + _OF_INPUT_GRADIENTS, key[1]))  # not the bits of the output's gradient
    return _QuantizedGradient.apply(x, quantizer, key, live)


def _as_tensor(x: Tensor, quantizer: AnyQuantizer, key: Tensor | None = None) -> QuantizedTensor:
    rows, value = x.detach().reshape(-1, x.shape[-1]), value_of(quantizer)
    fields = quantizer.quantize_fields(rows, key)
    return TENSOR_CLASSES.get(value.FORMAT, QuantizedTensor)(fields, value, x.shape, x.dtype, matrix_shape=rows.shape)


_OF_INPUT_GRADIENTS = 2**61


class _QuantizedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, key: Tensor | None, live: Any) -> Tensor:
        ctx.quantizer, ctx.live = quantizer, live
        ctx.save_for_backward(key)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        quantizer = ctx.quantizer if ctx.live is None else ctx.live()
        return _as_tensor(dx, quantizer, *ctx.saved_tensors), None, None, None


class _QuantizedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizer: AnyQuantizer) -> QuantizedTensor:
        return _as_tensor(y, quantizer)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
