"""`y = x w^T + b` in high precision or under a recipe, differentiable: the function behind every dense module.

The formula is Python around kernels on tensors, not one opaque operation per layer: the compiler sees every step. On an
accelerator it fuses the quantizations with what is around them; in a CPU graph the operands of block, MXFP8 and NVFP4
scaling are one operation each (`kernels/quantize/cpu_graph`). `dense_gemms` holds the three GEMMs. Live state
comes in as tensors; nothing is hidden in objects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.activation import Activation
from te_models.kernels.gemm import few_rows
from te_models.kernels.gemm.dense import linear as dense
from te_models.kernels.norm import Norm
from te_models.kernels.torch_versions import fix_width, own_result
from te_models.kernels.without_autocast import autocast_dtype_of, compute_dtype

from ..quantizer.delayed import update_amax_
from ..quantizer.state import QuantizerState
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from .dense_gemms import bias_gradient, dense_fprop, dense_gradients
from .fused_quantize import Prologue, fused_output, fused_storage, input_quantizer
from .gemm_operand import quantized_gemms, stored_for_few_rows
from .scaling import GemmConfig, GemmOptions, Scaling


class GemmCall(NamedTuple):
    """What a module hands down for one call of its GEMM, or of all GEMMs of a grouped layer.

    config: quantizers and options, None for high precision whose gradients go to autograd; cached: the weight quantized
    in an earlier micro-batch; amaxes: where a calibration records the amaxes of the input and of the weight.
    """

    config: GemmConfig | None
    state: QuantizerState
    cached: QuantizedTensor | None = None
    amaxes: tuple[Tensor, Tensor] | None = None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: GemmCall | None, prologue: Prologue | None = None
) -> Tensor:
    """Return `x @ weight^T + bias` in the compute dtype.

    x: [..., in], with a prologue its input; weight: [out, in], plain or quantized; bias: [out] or None; call: what the
    module computes it with, None for plain high precision.
    """
    fused = None if prologue is None else _fused_dtype(x, weight, call, prologue)
    if prologue is not None and fused is None:
        x, prologue = prologue.run(x), None
    dtype = compute_dtype(x) if fused is None else fused
    if prologue is None:
        x = x.to(dtype)
    if call is not None and call.amaxes is not None:
        calibrate(x, weight, call.amaxes)
    if call is None or call.config is None:
        if isinstance(weight, QuantizedTensor):
            return stored_linear(x, weight, bias)
        return dense(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    fix_width(x)
    # asked outside of the autograd function, which says so of a parameter under no_grad, too, and would save what no
    # backward pass reads
    grad, of_norm = torch.is_grad_enabled(), False
    function, norm_weight, norm_bias = (None, None, None) if prologue is None else prologue
    if prologue is not None:
        of_norm = any(p is not None and p.requires_grad for p in (norm_weight, norm_bias))
    wgrad = call.config.options.wgrad
    arguments = _Arguments(
        x.reshape(-1, x.shape[-1]) if prologue is None else x,
        norm_weight,
        norm_bias,
        weight,
        bias,
        call.cached,
        None if wgrad is None else wgrad.main_grad,
        *call.state,
        function,
        dtype,
        grad and (x.requires_grad or of_norm),
        grad and weight.requires_grad,
        *call.config,
    )
    return _DenseLinear.apply(*arguments).view(*x.shape[:-1], weight.shape[0])


def calibrate(x: Tensor, weight: Tensor, amaxes: tuple[Tensor, Tensor]) -> None:
    """Record the amaxes of x [..., in] and of the weight in `GemmCall.amaxes`."""
    update_amax_(amaxes[0], largest(x.reshape(-1, x.shape[-1])))
    update_amax_(amaxes[1], largest(weight))


def stored_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype, without a recipe. x: [..., in]."""
    bias = None if bias is None else bias.to(x.dtype)
    operand = stored_for_few_rows(x, weight)
    if operand is not None:
        y = few_rows.linear(x.reshape(-1, x.shape[-1]), operand, bias)
        return y.view(*x.shape[:-1], weight.shape[0])
    return dense(x, weight.dequantize(x.dtype), bias)


def _fused_dtype(x: Tensor, weight: Tensor, call: GemmCall | None, prologue: Prologue) -> torch.dtype | None:
    """Return the dtype of the GEMM whose input the prologue quantizes; None where they are two functions: in high
    precision, on a CPU, and where a recipe wants the high-precision result."""
    if call is None or call.config is None or call.config.quantizers is HIGH_PRECISION:
        return None
    if not quantized_gemms(x.device):
        return None
    dtype = prologue.dtype(x)
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    quantizer = input_quantizer(Scaling(call.config, call.state), needs_wgrad, x.device)
    fused = fused_output(quantizer, dtype, autocast_dtype_of(x) or dtype)
    return None if fused is None else dtype


def largest(x: Tensor) -> Tensor:
    """Return the amax of a tensor, [] for a matrix and [G] for G of them."""
    return q.amax(x.dequantize() if isinstance(x, QuantizedTensor) else x.detach())


class _Arguments(NamedTuple):
    """x: [T, K] in `dtype`, the GEMMs' dtype, or the input [..., H] of the prologue, which has dtype for a result;
    norm_weight, norm_bias: of the prologue; weight: [N, K] plain or quantized; bias: [N] or None; scale to
    gradient_log: of QuantizerState; needs_x, needs_weight: whether the gradients of x or a norm's parameter, and of the
    weight, are wanted; quantizers to index: of GemmConfig."""

    x: Any
    norm_weight: Any
    norm_bias: Any
    weight: Any
    bias: Any
    cached: Any
    main_grad: Any
    scale: Any
    amax: Any
    gradient: Any
    statistics: Any
    grad_statistics: Any
    key: Any
    gradient_log: Any
    function: Norm | Activation | None
    dtype: torch.dtype
    needs_x: bool
    needs_weight: bool
    quantizers: GemmQuantizers
    options: GemmOptions
    index: int | None


_NO_GRADIENTS: Any = _Arguments(*(None,) * len(_Arguments._fields))  # type: ignore[arg-type]


class _Saved(NamedTuple):
    """What autograd saves beside the statistics of the prologue and what fprop left for wgrad. x: of the prologue."""

    x: Any
    norm_weight: Any
    norm_bias: Any
    weight: Any
    cached: Any
    scale: Any
    key: Any


class _DenseLinear(torch.autograd.Function):
    """The dense layer, with or without a prologue whose result is quantized as it is made. Arguments: `_Arguments`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        a = _Arguments(*arguments)
        state = QuantizerState(a.scale, a.amax, a.gradient, a.statistics, a.grad_statistics, a.key)
        scaling = Scaling(GemmConfig(a.quantizers, a.options, a.index), state)
        x, statistics = a.x, ()
        if a.function is not None:
            quantizer = input_quantizer(scaling, a.needs_weight, x.device)
            output = fused_output(quantizer, a.dtype, a.dtype)
            assert quantizer is not None and output is not None, "the caller has asked"
            prologue = Prologue(a.function, a.norm_weight, a.norm_bias)
            fields, statistics, ctx.shape = prologue.run_quantized(x, *output)
            x = fused_storage(quantizer, fields, ctx.shape, a.dtype)
        needs = a.needs_x, a.needs_weight
        y, ctx.saved, tensors = dense_fprop(x, a.weight, a.bias, a.cached, scaling, a.dtype, needs)
        input_of_prologue = None if a.function is None else a.x
        if isinstance(a.function, Activation):
            input_of_prologue = a.function.stored(a.x)
        saved = _Saved(input_of_prologue, a.norm_weight, a.norm_bias, a.weight, a.cached, a.scale, a.key)
        ctx.save_for_backward(*saved, *statistics, *tensors)
        # not saved: backward writes to them, also between the forward and the backward pass of another call
        ctx.main_grad, ctx.grad_statistics = a.main_grad, a.grad_statistics
        ctx.gradient, ctx.gradient_log = a.gradient, a.gradient_log
        ctx.function, ctx.dtype, ctx.statistics = a.function, a.dtype, len(statistics)
        ctx.config = (a.quantizers, a.options, a.index)
        ctx.bias_dtype = None if a.bias is None else a.bias.dtype
        return own_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # read once: a checkpoint of another library recomputes for one reading
        tensors = ctx.saved_tensors
        count = len(_Saved._fields)
        s, statistics = _Saved(*tensors[:count]), tuple(tensors[count : count + ctx.statistics])
        rest = list(tensors[count + ctx.statistics :])
        needs = _Arguments(*ctx.needs_input_grad)
        needs_x = needs.x or needs.norm_weight or needs.norm_bias
        config = GemmConfig(*ctx.config)
        scaling = Scaling.of_backward(config, s.scale, s.key, ctx.gradient, ctx.gradient_log, ctx.grad_statistics)
        dx, dw = dense_gradients(
            dy, s.weight, s.cached, ctx.main_grad, scaling, ctx.saved, rest, ctx.dtype, (needs_x, needs.weight)
        )
        of_norm: tuple[Tensor | None, Tensor | None] = (None, None)
        if ctx.function is not None and dx is not None:
            prologue = Prologue(ctx.function, s.norm_weight, s.norm_bias)
            needs_norm = (needs.norm_weight, needs.norm_bias)
            x = ctx.function.restored(s.x, ctx.dtype) if isinstance(ctx.function, Activation) else s.x
            dx, dw_norm, db_norm = prologue.gradients(dx.view(ctx.shape), x, statistics, needs_norm)
            of_norm = (dw_norm, db_norm)
        db = bias_gradient(dy, ctx.bias_dtype) if needs.bias else None
        gradients = _NO_GRADIENTS._replace(
            x=dx if needs.x else None, norm_weight=of_norm[0], norm_bias=of_norm[1], weight=dw, bias=db
        )
        return tuple(gradients)
