"""The dense layer as one operation forward and one backward: what `Linear(boundary="layer")` is to the compiler.

The numbers equal `linear_function`'s, because the operations call its functions. Quantized weights and caches are among
the arguments, live state that is written to is declared, and what is saved of x is a quantized storage or x itself. On
fake tensors the results follow from one description. docs/compile.md says which boundary is better where.
"""

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from te_models.kernels.custom_op import Alias, Output, differentiable, like, operation
from te_models.kernels.gemm.dense import linear as dense
from te_models.kernels.gemm.dense import multiply_dense
from te_models.suggestions import check_choice

from ..dynamo.custom_op import QuantizedResult, quantized_like
from ..quantizer.delayed import update_amax_
from ..quantizer.state import NO_STATE, QuantizerState
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage
from .plain import stored_linear
from .product import bias_gradient, target
from .scaling import GemmCall, GemmConfig, GemmOptions, Scaling
from .three_gemms import NOTHING, ONE_MATRIX, Forms, SavedForm, fprop, gradients, plain_weights
from .wgrad import WeightGradient

Boundary = Literal["kernel", "layer"]


def check_boundary(boundary: str, tp_size: int, delay_wgrad_compute: bool) -> Boundary:
    """Return the boundary. ValueError for an unknown one, and for "layer" with what one operation cannot do."""
    check_choice("boundary", boundary, ("kernel", "layer"))
    refused = {"a weight that is split over ranks": tp_size > 1, "delay_wgrad_compute=True": delay_wgrad_compute}
    for what, there in refused.items():
        if there and boundary == "layer":
            raise ValueError(f"boundary='layer' does not work with {what}; allowed: boundary='kernel'")
    return cast(Boundary, boundary)


class Forward(NamedTuple):
    """y: [T, N]; saved: what wgrad needs of x, None where nothing."""

    y: Tensor
    saved: Tensor | QuantizedStorage | None


def _saved(x: Tensor, quantizers: GemmQuantizers, save_original_input: bool, needs: list[bool]) -> Any:
    """Describe what is saved of x: one copy of it quantized, or x itself."""
    override = quantizers.backward_override
    if not needs[1]:
        return None
    if quantizers == HIGH_PRECISION or override == "high_precision" or (override is None and save_original_input):
        return Alias("x")
    rowwise = quantizers.input.symmetric or override is not None
    return quantized_like(x, quantizers.input.with_usage(rowwise=rowwise, columnwise=not rowwise))


def _results(
    x: Tensor, weight: Tensor, quantizers: GemmQuantizers, save_original_input: bool, needs: list[bool]
) -> Forward:
    y: Any = like(x, (x.shape[0], weight.shape[0]))
    return Forward(y, _saved(x, quantizers, save_original_input, needs))


@operation("linear_layer", _results, mutates=("amax", "statistics"), places=4)
def linear_layer_forward(
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
    torch_gradients: bool,
    needs: list[bool],
) -> Forward:
    """x: [T, K] in the compute dtype; weight: [N, K]; torch_gradients: without a recipe, and without a main gradient,
    as `linear_function` is then; the rest as in `fprop`."""
    if torch_gradients:
        if isinstance(weight, QuantizedTensor):
            y = stored_linear(x, weight, bias)
        else:
            y = dense(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return Forward(y.contiguous(), x if needs[1] else None)
    quantizers = _own(quantizers)
    live = QuantizerState(scale, amax, None, statistics)
    config = GemmConfig(quantizers, GemmOptions(save_original_input or quantizers is HIGH_PRECISION), gemm)
    y, _, tensors = fprop(x, (weight,), bias, cached, ONE_MATRIX, Scaling(config, live), x.dtype, (False, needs[1]))
    described = _saved(x, quantizers, save_original_input, needs)
    if isinstance(described, QuantizedResult):
        return Forward(y, described.make(tensors))
    return Forward(y, tensors[0] if tensors else None)


def _own(quantizers: GemmQuantizers) -> GemmQuantizers:
    """Return the very object that says that there is no recipe, if these are equal to it."""
    return HIGH_PRECISION if quantizers == HIGH_PRECISION else quantizers


def _gradients(
    dy: Tensor, weight: Tensor, main_grad: Tensor | None, bias_dtype: torch.dtype | None, needs: list[bool]
) -> tuple[Output | None, ...]:
    return (
        like(dy, (dy.shape[0], weight.shape[1])) if needs[0] else None,
        like(dy, weight.shape, weight.dtype) if needs[1] and main_grad is None else None,
        like(dy, (dy.shape[1],), bias_dtype) if needs[2] else None,
    )


_WRITTEN = ("gradient", "gradient_log", "grad_statistics", "main_grad")


@operation("linear_layer_backward", _gradients, mutates=_WRITTEN, places=3)
def linear_layer_backward(
    dy: Tensor,
    saved: Tensor | QuantizedStorage | None,
    weight: Tensor | QuantizedTensor,
    cached: QuantizedTensor | None,
    main_grad: Tensor | None,
    scale: Tensor | None,
    gradient: Tensor | None,
    gradient_scale: Tensor | None,
    gradient_log: Tensor | None,
    grad_statistics: Tensor | None,
    key: Tensor | None,
    quantizers: GemmQuantizers,
    gemm: int,
    overwrite: bool,
    torch_gradients: bool,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """dy: [T, N] -> gradients of x [T, K], weight [N, K] and bias [N]. gradient: of `QuantizerState`, and, where a
    gradient_log is written to instead, gradient_scale."""
    with torch.no_grad():  # an operation has no derivatives but those that are registered for it
        if torch_gradients:
            return _as_torch(dy, saved, weight, bias_dtype, needs)
        live_gradient = gradient if gradient_log is None else gradient_scale
        wgrad = None if main_grad is None else WeightGradient(main_grad, overwrite)
        quantizers = _own(quantizers)
        config = GemmConfig(quantizers, GemmOptions(wgrad=wgrad), gemm)
        scaling = Scaling.of_backward(config, scale, key, live_gradient, gradient_log, grad_statistics)
        forms, tensors = _forms(saved, quantizers, dy)
        into, wanted = () if main_grad is None else (main_grad,), (needs[0], needs[1])
        dx, (dw,) = gradients(dy.contiguous(), (weight,), cached, into, ONE_MATRIX, scaling, forms, tensors, wanted)
        db = bias_gradient(dy, bias_dtype) if needs[2] and bias_dtype is not None else None
        return dx, dw, db


def _as_torch(
    dy: Tensor, x: Tensor | QuantizedStorage | None, weight: Tensor, bias_dtype: torch.dtype | None, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd derives of `linear_function` without a recipe, by the same products."""
    dx = dw = db = None
    if needs[0]:
        dx = multiply_dense(dy, plain_weights((weight,), dy.dtype, groups=False))
    if needs[1]:
        assert isinstance(x, Tensor)
        dw = multiply_dense(dy.t(), x).to(weight.dtype)
    if needs[2] and bias_dtype is not None:
        db = dy.sum(0).to(bias_dtype) if dy.dtype == torch.float32 else bias_gradient(dy, bias_dtype)
    return dx, dw, db


def _forms(
    saved: Tensor | QuantizedStorage | None, quantizers: GemmQuantizers, dy: Tensor
) -> tuple[Forms, list[Tensor]]:
    to, override = target(dy.device, dy.dtype), quantizers.backward_override
    if saved is None:
        return Forms(to, NOTHING, NOTHING), []
    if isinstance(saved, Tensor):
        return Forms(to, SavedForm("plain" if override else "original"), NOTHING), [saved]
    form = SavedForm("dequantized" if override else "fields", saved.quantizer.field_names(), tuple(saved.shape))
    return Forms(to, form, NOTHING), list(saved.fields.values())


_function = differentiable(linear_layer_forward, linear_layer_backward, gradients=("x", "weight", "bias"))


def as_one_operation(x: Tensor, weight: Tensor, bias: Tensor | None, call: GemmCall | None) -> Tensor:
    """Return `linear_function` of x [..., in] in the compute dtype as one operation, whose backward pass is one, too.

    Raises ValueError for a weight whose wrapper waits for `grad_added_to_main_grad`: no operation sets it.
    """
    config = None if call is None else call.config
    quantizers, options, index = GemmConfig(HIGH_PRECISION) if config is None else config
    live = NO_STATE if call is None else call.state
    wgrad = options.wgrad
    if wgrad is not None and wgrad.announced is not None:
        raise ValueError(
            "boundary='layer' does not work with a weight that has grad_added_to_main_grad; allowed: boundary='kernel'"
        )
    # a graph records here first: a checkpoint in it would hold the module's own tensor, an argument like any other, for
    # the recomputation, and that would record a second time
    amax = live.amax
    if amax is not None and live.gradient_log is not None:
        amax = torch.zeros(amax.shape, dtype=torch.float32, device=amax.device)
    y = _function(
        x=x.reshape(-1, x.shape[-1]),
        weight=weight,
        bias=bias,
        cached=None if call is None else call.cached,
        scale=live.scale,
        amax=amax,
        statistics=live.statistics,
        quantizers=quantizers,
        gemm=index or 0,
        save_original_input=options.save_original_input,
        torch_gradients=config is None,
        main_grad=None if wgrad is None else wgrad.main_grad,
        gradient=live.gradient if live.gradient_log is None else None,
        gradient_scale=None if live.gradient_log is None else live.gradient,
        gradient_log=live.gradient_log,
        grad_statistics=live.grad_statistics,
        key=live.key,
        overwrite=wgrad is not None and wgrad.overwrite,
        bias_dtype=None if bias is None else bias.dtype,
    )
    if amax is not None and live.amax is not None and amax is not live.amax:
        update_amax_(live.amax, amax)
    return y.view(*x.shape[:-1], weight.shape[0])
