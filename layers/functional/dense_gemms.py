"""The three GEMMs of a dense layer under a recipe, as functions that know nothing of autograd.

T rows, K in, N out. The operands are quantized:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

Live state (scales, amaxes, main gradients) comes in as tensors and is written in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand
from te_models.kernels.gemm.cpu import operand_dtype

from ..quantizer import Fields, Usage
from ..quantizer.state import value_of
from ..recipe.base import HIGH_PRECISION
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
    shared_gradient_operands,
)
from .scaling import Scaling
from .weight_format import check_format, check_operands
from .wgrad import run_wgrad


def dense_fprop(
    x: Tensor | QuantizedStorage,
    weight: Tensor,
    bias: Tensor | None,
    cached: QuantizedTensor | None,
    scaling: Scaling,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, SavedInput, tuple[Tensor, ...]]:
    """Return (`x w^T + b` [T, N], how to read what is saved of x, what is saved).

    x: [T, K] in `dtype`, or already quantized by the input quantizer; weight: [N, K] plain or quantized; cached: the
    weight quantized in an earlier micro-batch; needs: whether the gradients of x and of the weight will be wanted.
    """
    quantizers, options, _ = scaling.config
    stored = weight if cached is None else cached
    on = operands_on(x.device)
    left, saved, tensors = quantize_and_save(
        scaling.for_input(records=True),
        x,
        dtype,
        quantizers.backward_override,
        options.save_original_input,
        needs[1],
        on,
    )
    if scaling.state.statistics is not None:
        scaling.record_statistics(x, None if isinstance(stored, QuantizedTensor) else lambda: stored)
    right, fields = fprop_weight(stored, scaling, dtype, needs[0], on)
    saved = replace(saved, weight_names=tuple(fields)) if fields else saved
    return run_gemm(left, right, dtype, bias), saved, (*tensors, *fields.values())


def fprop_weight(
    stored: Tensor, scaling: Scaling, dtype: torch.dtype, needs_dgrad: bool, on: OperandsOn
) -> tuple[GemmOperand, Fields]:
    """Return a weight [..., N, K] as an operand of fprop and what `dgrad_weight` may read of it, see
    `quantize_weight`."""
    quantizers = scaling.config.quantizers
    if isinstance(stored, QuantizedTensor):
        if quantizers is HIGH_PRECISION:  # no recipe is in force that it has to fit
            stored = stored.dequantize(dtype)
        else:
            check_operands(stored, quantizers, needs_dgrad)
            return weight_operand(stored, scaling, "rowwise", dtype), {}
    quantizer = scaling.for_weight(records=True)
    if on != "quantized":  # where dgrad makes its own operand, see `quantize_weight`
        return quantizer.operand(stored, "rowwise", operand_dtype(stored.device, dtype)), {}
    if quantizers.backward_override:
        return quantized_operand(quantizer, stored, "rowwise", dtype), {}
    return quantize_weight(quantizer, stored, dtype, needs_dgrad)


def dgrad_weight(stored: Tensor, fields: Fields, scaling: Scaling, dtype: torch.dtype) -> GemmOperand:
    """Return a weight as an operand of dgrad: the fields that fprop saved, or quantized now."""
    if not fields:
        return weight_operand(stored, scaling, "columnwise", dtype)
    return stored_operand(value_of(scaling.for_weight()), fields, "columnwise", dtype, stored.shape)


def dense_gradients(
    dy: Tensor,
    weight: Tensor,
    cached: QuantizedTensor | None,
    main_grad: Tensor | None,
    scaling: Scaling,
    saved: SavedInput,
    tensors: list[Tensor],
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight of `dense_fprop`, each if needed, the latter if it goes to autograd.

    dy: [T, N]; main_grad: where the options want the weight gradient; saved, tensors: from `dense_fprop`.
    """
    quantizers, options, _ = scaling.config
    override, key = quantizers.backward_override, scaling.state.key
    of_x, weight_fields = saved.parts(tensors)
    quantizer = scaling.for_gradient(dy, _amax)
    of_dy = shared_gradient_operands(quantizer, dy, dtype, key, saved.on) if all(needs) else {}
    dx = dw = None
    if needs[0]:
        right = _dgrad_operand(weight, cached, weight_fields, scaling, dtype)
        # the copy of dy ends with the call, before wgrad makes its own
        dx = run_gemm(
            of_dy["rowwise"] if of_dy else quantized_operand(quantizer, dy, "rowwise", dtype, key), right, dtype
        )
    if needs[1]:
        left = of_dy["columnwise"] if of_dy else quantized_operand(quantizer, dy, "columnwise", dtype, key)
        right = saved.operand(scaling.for_input(), of_x, dtype)
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
    scaling: Scaling,
    dtype: torch.dtype,
) -> GemmOperand:
    """Return the weight as the right operand of dgrad, as the recipe's backward override says."""
    stored = weight if cached is None else cached
    override = scaling.config.quantizers.backward_override
    if override is None:
        return dgrad_weight(stored, fields, scaling, dtype)
    if override == "high_precision":
        return transposed(Operand(plain_weight(weight, dtype), None), "columnwise")
    rowwise = weight_operand(stored, scaling, "rowwise", dtype)
    return transposed(Operand(scaled_values(dequantized(rowwise, dtype), dtype), None), "columnwise")


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias [N] from dy [..., N], summed in float32."""
    return dy.reshape(-1, dy.shape[-1]).float().sum(0).to(dtype)


def weight_operand(weight: Tensor, scaling: Scaling, usage: Usage, dtype: torch.dtype) -> GemmOperand:
    """Return a weight as an operand of a GEMM: a stored one exactly as it is, a high-precision one quantized now.

    Raises ValueError where the stored format is not the recipe's.
    """
    if not isinstance(weight, QuantizedTensor):
        live = scaling.for_weight()
        if usage == "columnwise" and live.symmetric and in_cpu_graph(weight.device):
            # fprop's numbers, rounded again: as a stack of one, or the graph would store fprop's in 16 bits for dgrad
            again = live.operand(weight[None], usage, dtype)
            left = again.scale if again.scale is None or again.scale.dim() < weight.dim() - 1 else again.scale[0]
            return transposed(Operand(again.values[0], left), usage)
        return quantized_operand(live, weight, usage, dtype)
    check_format(weight, scaling.config.quantizers.weight)
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
