"""The three GEMMs of a dense layer under a recipe, as functions that know nothing of autograd.

T rows, K in, N out. The operands are quantized:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

Live state (scales, amaxes, main gradients) comes in as tensors and is written in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand
from te_models.kernels.gemm.cpu import operand_dtype

from ..quantizer import Fields, Quantizer, Usage
from ..quantizer.identity import UNQUANTIZED
from ..quantizer.state import AnyQuantizer, QuantizerState, unrecorded, value_of, with_gradient_state, with_state
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage
from .double_backward import first_derivative
from .gemm_operand import (
    GemmOperand,
    OperandsOn,
    accumulate_gemm_,
    dequantized,
    in_cpu_graph,
    operands_on,
    quantized_operand,
    run_gemm,
    stored_operand,
    transposed,
)
from .saved_input import (
    SavedInput,
    quantize_and_save,
    quantize_weight,
    record_statistics,
    shared_gradient_operands,
)
from .weight_format import check_format, check_operands
from .wgrad import WeightGradient, run_wgrad


class GemmOptions(NamedTuple):
    """How a module wants its gradients: see `Linear`."""

    save_original_input: bool = False
    wgrad: WeightGradient | None = None


DEFAULT_OPTIONS = GemmOptions()


class GemmConfig(NamedTuple):
    """The constants of a layer's GEMMs. index: of its GEMM among the module's, the column of the state that is its own;
    None: all of them, as of a grouped layer."""

    quantizers: GemmQuantizers
    options: GemmOptions = DEFAULT_OPTIONS
    index: int | None = 0


def dense_fprop(
    x: Tensor | QuantizedStorage,
    weight: Tensor,
    bias: Tensor | None,
    cached: QuantizedTensor | None,
    state: QuantizerState,
    config: GemmConfig,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, SavedInput, tuple[Tensor, ...]]:
    """Return (`x w^T + b` [T, N], how to read what is saved of x, what is saved).

    x: [T, K] in `dtype`, or already quantized by the input quantizer; weight: [N, K] plain or quantized; cached: the
    weight quantized in an earlier micro-batch; needs: whether the gradients of x and of the weight will be wanted.
    """
    quantizers, options, index = config
    stored = weight if cached is None else cached
    x_quantizer: AnyQuantizer = quantizers.input
    if state.scale is not None:
        x_quantizer = with_state(quantizers.input, state.scale, state.amax, "input", index)
    on = operands_on(x.device)
    left, saved, tensors = quantize_and_save(
        x_quantizer, x, dtype, quantizers.backward_override, options.save_original_input, needs[1], on
    )
    if state.statistics is not None:
        of_gemm = state.statistics[(index or 0) % state.statistics.shape[0]]
        if isinstance(x, Tensor):  # statistics describe the values before quantization
            record_statistics(of_gemm[0], x_quantizer, x)
        if not isinstance(stored, QuantizedTensor):
            record_statistics(of_gemm[1], with_state(quantizers.weight, state.scale, None, "weight", index), stored)
    right, fields = fprop_weight(stored, quantizers, dtype, state, needs[0], index, on)
    saved = replace(saved, weight_names=tuple(fields)) if fields else saved
    return run_gemm(left, right, dtype, bias), saved, (*tensors, *fields.values())


def fprop_weight(
    stored: Tensor,
    quantizers: GemmQuantizers,
    dtype: torch.dtype,
    state: QuantizerState,
    needs_dgrad: bool,
    index: int | None,
    on: OperandsOn,
) -> tuple[GemmOperand, Fields]:
    """Return a weight [..., N, K] as an operand of fprop and what `dgrad_weight` may read of it, see
    `quantize_weight`."""
    if isinstance(stored, QuantizedTensor):
        if quantizers is HIGH_PRECISION:  # no recipe is in force that it has to fit
            stored = stored.dequantize(dtype)
        else:
            check_operands(stored, quantizers, needs_dgrad)
            return weight_operand(stored, quantizers.weight, "rowwise", dtype, state.scale, state.amax, index), {}
    quantizer: AnyQuantizer = quantizers.weight
    if state.scale is not None:
        quantizer = with_state(quantizers.weight, state.scale, state.amax, "weight", index)
    if on != "quantized":  # where dgrad makes its own operand, see `quantize_weight`
        return quantizer.operand(stored, "rowwise", operand_dtype(stored.device, dtype)), {}
    if quantizers.backward_override:
        return quantized_operand(quantizer, stored, "rowwise", dtype), {}
    return quantize_weight(quantizer, stored, dtype, needs_dgrad, on)


def dgrad_weight(
    stored: Tensor,
    fields: Fields,
    quantizers: GemmQuantizers,
    dtype: torch.dtype,
    state: QuantizerState,
    index: int | None,
) -> GemmOperand:
    """Return a weight as an operand of dgrad: the fields that fprop saved, or quantized now."""
    if not fields:
        return weight_operand(stored, quantizers.weight, "columnwise", dtype, state.scale, None, index)
    value = value_of(with_state(quantizers.weight, state.scale, None, "weight", index))
    return stored_operand(value, fields, "columnwise", dtype, stored.shape)


def dense_gradients(
    dy: Tensor,
    weight: Tensor,
    cached: QuantizedTensor | None,
    main_grad: Tensor | None,
    state: QuantizerState,
    config: GemmConfig,
    saved: SavedInput,
    tensors: list[Tensor],
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight of `dense_fprop`, each if needed, the latter if it goes to autograd.

    dy: [T, N]; main_grad: where the options want the weight gradient; saved, tensors: from `dense_fprop`.
    """
    quantizers, options, index = config
    override, scale, key = quantizers.backward_override, state.scale, state.key
    of_x, weight_fields = saved.parts(tensors)
    quantizer: AnyQuantizer = UNQUANTIZED
    if not override:
        quantizer = with_gradient_state(quantizers.grad_output, state, lambda: _amax(dy.detach()), index)
        if state.grad_statistics is not None:
            into = state.grad_statistics[(index or 0) % state.grad_statistics.shape[0]]
            record_statistics(into, unrecorded(quantizer), dy, key)
    of_dy = shared_gradient_operands(quantizer, dy, dtype, key, saved.on) if all(needs) else {}
    dx = dw = None
    if needs[0]:
        right = _dgrad_operand(weight, cached, weight_fields, quantizers, dtype, state, index)
        # the copy of dy ends with the call, before wgrad makes its own
        dx = run_gemm(
            of_dy["rowwise"] if of_dy else quantized_operand(quantizer, dy, "rowwise", dtype, key), right, dtype
        )
    if needs[1]:
        left = of_dy["columnwise"] if of_dy else quantized_operand(quantizer, dy, "columnwise", dtype, key)
        right = saved.operand(with_state(quantizers.input, scale, None, "input", index), of_x, dtype)
        wgrad = options.wgrad

        def compute() -> tuple[Tensor | None]:
            if main_grad is None:
                return (run_gemm(left, right, weight.dtype),)
            accumulate_gemm_(main_grad, left, right, accumulate=not (wgrad and wgrad.overwrite))
            return (None,)

        (dw,) = run_wgrad(wgrad, (weight,), (left, right), compute)
    return first_derivative(dx, override, dy, weight), first_derivative(dw, override, dy, *tensors)


def _amax(x: Tensor) -> Tensor:
    return q.raised_amax(x, x.new_zeros((), dtype=torch.float32))


def _dgrad_operand(
    weight: Tensor,
    cached: QuantizedTensor | None,
    fields: Fields,
    quantizers: GemmQuantizers,
    dtype: torch.dtype,
    state: QuantizerState,
    index: int | None,
) -> GemmOperand:
    """Return the weight as the right operand of dgrad, as the recipe's backward override says."""
    stored = weight if cached is None else cached
    if quantizers.backward_override is None:
        return dgrad_weight(stored, fields, quantizers, dtype, state, index)
    if quantizers.backward_override == "high_precision":
        return transposed(Operand(plain_weight(weight, dtype), None), "columnwise")
    rowwise = weight_operand(stored, quantizers.weight, "rowwise", dtype, state.scale, None, index)
    return transposed(Operand(scaled_values(dequantized(rowwise, dtype), dtype), None), "columnwise")


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias [N] from dy [..., N], summed in float32."""
    return dy.reshape(-1, dy.shape[-1]).float().sum(0).to(dtype)


def weight_operand(
    weight: Tensor,
    quantizer: Quantizer,
    usage: Usage,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    index: int | None = None,
) -> GemmOperand:
    """Return a weight as an operand of a GEMM: a stored one exactly as it is, a high-precision one quantized now.

    Raises ValueError where the stored format is not the recipe's.
    """
    if not isinstance(weight, QuantizedTensor):
        live = with_state(quantizer, scale, amax, "weight", index)
        if usage == "columnwise" and live.symmetric and in_cpu_graph(weight.device):
            # fprop's numbers, rounded again: as a stack of one, or the graph would store fprop's in 16 bits for dgrad
            again = live.operand(weight[None], usage, dtype)
            left = again.scale if again.scale is None or again.scale.dim() < weight.dim() - 1 else again.scale[0]
            return transposed(Operand(again.values[0], left), usage)
        return quantized_operand(live, weight, usage, dtype)
    check_format(weight, quantizer)
    weight.require_matrix("be the operand of a GEMM")
    return stored_operand(weight.quantizer, weight.fields, usage, dtype, weight.matrix_shape)


def plain_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight's high-precision values."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)


def scaled_values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand's values, [..., R, C], with its scale [...] applied."""
    if operand.scale is None:
        return operand.values.to(dtype)
    return (operand.values.float() * operand.scale[..., None, None]).to(dtype)
