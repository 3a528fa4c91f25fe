"""A linear layer as one operation forward and one backward, around the functions behind `Linear`.

The example and the test of what the registry can describe: quantized weights and caches among the arguments, live
state that is written to, what is kept of x as a quantized storage or as an alias of x, gradients that may be absent.
The library itself registers kernels and not layers: docs/contributing/operation.md says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.custom_op import Alias, Output, differentiable, like, operation
from te_models.layers import QuantizedStorage, QuantizedTensor
from te_models.layers.dynamo.custom_op import QuantizedResult, quantized_like
from te_models.layers.dynamo.quantizer_string import with_usages
from te_models.layers.functional.dense_gemms import (
    DEFAULT_OPTIONS,
    GemmConfig,
    GemmOptions,
    bias_gradient,
    dense_fprop,
    dense_gradients,
)
from te_models.layers.functional.gemm_operand import compute_dtype
from te_models.layers.functional.linear import GemmCall, linear
from te_models.layers.functional.saved_input import SavedInput
from te_models.layers.functional.wgrad import WeightGradient
from te_models.layers.module.base import QuantizedModule
from te_models.layers.quantizer.state import QuantizerState
from te_models.layers.recipe.base import GemmQuantizers


class Forward(NamedTuple):
    """y: [T, N]; kept: what wgrad needs of x, None where nothing."""

    y: Tensor
    kept: Tensor | QuantizedStorage | None


def _kept(x: Tensor, quantizers: GemmQuantizers, save_original_input: bool, needs: list[bool]) -> Any:
    """Describe what is kept of x: one copy of it quantized, or x itself."""
    override = quantizers.backward_override
    if not needs[1]:
        return None
    if override == "high_precision" or (override is None and save_original_input):
        return Alias("x")
    rowwise = quantizers.input.symmetric or override is not None
    return quantized_like(x, with_usages(quantizers.input, rowwise, not rowwise))


def _results(
    x: Tensor, weight: Tensor, quantizers: GemmQuantizers, save_original_input: bool, needs: list[bool]
) -> Forward:
    return Forward(like(x, (x.shape[0], weight.shape[0])), _kept(x, quantizers, save_original_input, needs))


@operation("test_linear", _results, mutates=("amax", "statistics"), places=4)
def linear_forward(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None,
    cached: QuantizedTensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    statistics: Tensor | None,
    quantizers: GemmQuantizers,
    gemm: int,
    save_original_input: bool,
    needs: list[bool],
) -> Forward:
    """x: [T, K] in the compute dtype; weight: [N, K]; the rest as in `dense_fprop`."""
    live = QuantizerState(scale, amax, None, statistics)
    config = GemmConfig(quantizers, GemmOptions(save_original_input), gemm)
    y, _, tensors = dense_fprop(x, weight, bias, cached, live, config, x.dtype, (False, needs[1]))
    described = _kept(x, quantizers, save_original_input, needs)
    if isinstance(described, QuantizedResult):
        return Forward(y, described.make(tensors))
    return Forward(y, tensors[0] if tensors else None)


def _gradients(
    dy: Tensor, weight: Tensor, main_grad: Tensor | None, bias_dtype: torch.dtype | None, needs: list[bool]
) -> tuple[Output | None, ...]:
    return (
        like(dy, (dy.shape[0], weight.shape[1])) if needs[0] else None,
        like(dy, weight.shape, weight.dtype) if needs[1] and main_grad is None else None,
        like(dy, (dy.shape[1],), bias_dtype) if needs[2] else None,
    )


@operation("test_linear_backward", _gradients, mutates=("gradient", "grad_statistics", "main_grad"), places=3)
def linear_backward(
    dy: Tensor,
    kept: Tensor | QuantizedStorage | None,
    weight: Tensor | QuantizedTensor,
    cached: QuantizedTensor | None,
    main_grad: Tensor | None,
    scale: Tensor | None,
    gradient: Tensor | None,
    grad_statistics: Tensor | None,
    key: Tensor | None,
    quantizers: GemmQuantizers,
    gemm: int,
    overwrite: bool,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """dy: [T, N] -> gradients of x [T, K], weight [N, K] and bias [N]."""
    live = QuantizerState(scale, None, gradient, None, grad_statistics, key)
    wgrad = None if main_grad is None else WeightGradient(main_grad, overwrite)
    config = GemmConfig(quantizers, GemmOptions(wgrad=wgrad), gemm)
    form, tensors = _as_kept(kept, quantizers)
    with torch.no_grad():  # an operation has no derivatives but those that are registered for it
        dx, dw = dense_gradients(
            dy.contiguous(), weight, cached, main_grad, live, config, form, tensors, dy.dtype, (needs[0], needs[1])
        )
    db = bias_gradient(dy, bias_dtype) if needs[2] and bias_dtype is not None else None
    return dx, dw, db


def _as_kept(kept: Tensor | QuantizedStorage | None, quantizers: GemmQuantizers) -> tuple[SavedInput, list[Tensor]]:
    if kept is None:
        return SavedInput("nothing"), []
    if isinstance(kept, Tensor):
        return SavedInput("original" if quantizers.backward_override is None else "plain"), [kept]
    form = "fields" if quantizers.backward_override is None else "dequantized"
    return SavedInput(form, kept.quantizer.field_names(), tuple(kept.shape)), list(kept.fields.values())


linear_function = differentiable(linear_forward, linear_backward, gradients=("x", "weight", "bias"))


def linear_op(
    module: QuantizedModule,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gemm: int = 0,
    cached: QuantizedTensor | None = None,
    options: GemmOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Do what `library_linear` does, under a recipe."""
    x = x.to(compute_dtype(x))
    quantizers = module.gemm_quantizers()
    assert quantizers is not None, "in high precision there is nothing to register"
    live = module.live_state(quantizers)
    wgrad = options.wgrad
    y = linear_function(
        x=x.reshape(-1, x.shape[-1]),
        weight=weight,
        bias=bias,
        cached=cached,
        scale=live.scale,
        amax=live.amax,
        statistics=live.statistics,
        quantizers=quantizers,
        gemm=gemm,
        save_original_input=options.save_original_input,
        main_grad=None if wgrad is None else wgrad.main_grad,
        gradient=live.gradient,
        grad_statistics=live.grad_statistics,
        key=live.key,
        overwrite=wgrad is not None and wgrad.overwrite,
        bias_dtype=None if bias is None else bias.dtype,
    )
    return y.view(*x.shape[:-1], weight.shape[0])


def library_linear(
    module: QuantizedModule,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    cached: QuantizedTensor | None = None,
    options: GemmOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Do what a module's forward pass does, with these options."""
    quantizers = module.gemm_quantizers()
    assert quantizers is not None
    return linear(x, weight, bias, GemmCall(GemmConfig(quantizers, options), module.live_state(quantizers), cached))
