"""Public norms. On CPU the reference runs, eager or fused by Inductor; on an accelerator two registered kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import as_matrix
from . import reference

__all__ = ["layer_norm", "norm_bwd", "norm_fwd", "rms_norm"]


def output_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None, weight_last: bool) -> torch.dtype:
    """Return the dtype of a norm's result: x's, promoted with the parameters' that multiply after rounding."""
    dtype = x.dtype
    for parameter in (weight, bias) if weight_last else ():
        dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    return dtype


@torch.library.custom_op("te_models::norm_fwd", mutates_args=())
def norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    zero_centered: bool,
    weight_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x [..., H]: LayerNorm if `centered`, else RMSNorm. Runs in Triton.

    Returns y [..., H], and what the backward needs in float32: mean [...] (empty unless centered) and rstd [...].
    Differentiable once in x, weight and bias.
    """
    from . import triton

    dtype = output_dtype(x, weight, bias, weight_last)
    y, mean, rstd = triton.norm_fwd(as_matrix(x), weight, bias, eps, centered, zero_centered, weight_last, dtype)
    lead = x.shape[:-1]
    return y.view(x.shape), mean.view(lead) if centered else mean, rstd.view(lead)


@norm_fwd.register_fake
def _(x, weight, bias, eps, centered, zero_centered, weight_last):
    y = x.new_empty(x.shape, dtype=output_dtype(x, weight, bias, weight_last))
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return y, torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd


@torch.library.custom_op("te_models::norm_bwd", mutates_args=())
def norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
    zero_centered: bool,
    weight_last: bool,
    weight_grad: torch.dtype | None,
    bias_grad: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [..., H], weight [H] and bias [H] of `norm_fwd`, from its statistics.

    weight_grad, bias_grad: the dtype wanted, or None where the gradient is not (it comes back empty).
    """
    from . import triton

    flags = (centered, zero_centered, weight_last, weight_grad, bias_grad)
    dx, d_weight, d_bias = triton.norm_bwd(as_matrix(dy), as_matrix(x), weight, mean.flatten(), rstd.flatten(), *flags)
    return dx.view(x.shape), d_weight, d_bias


@norm_bwd.register_fake
def _(dy, x, weight, mean, rstd, centered, zero_centered, weight_last, weight_grad, bias_grad):
    def parameter(dtype: torch.dtype | None) -> Tensor:
        return x.new_empty(0) if dtype is None else x.new_empty(x.shape[-1], dtype=dtype)

    return x.new_empty(x.shape), parameter(weight_grad), parameter(bias_grad)


def _setup(ctx, inputs, output) -> None:
    x, weight, bias, _, ctx.centered, ctx.zero_centered, ctx.weight_last = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, dy: Tensor, *_):
    x, weight, mean, rstd = ctx.saved_tensors
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    dx, d_weight, d_bias = norm_bwd(
        dy,
        x,
        weight,
        mean,
        rstd,
        ctx.centered,
        ctx.zero_centered,
        ctx.weight_last,
        weight.dtype if needs_weight else None,
        ctx.bias_dtype if needs_bias else None,
    )
    return dx, d_weight if needs_weight else None, d_bias if needs_bias else None, None, None, None, None


norm_fwd.register_autograd(_backward, setup_context=_setup)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False, cast_order: str = "weight_last"
) -> Tensor:
    """Return `gamma * x / sqrt(mean(x^2) + eps)` over the last dimension.

    x: [..., H]; weight: [H] or None; gamma is `weight`, or `1 + weight` when zero_centered. Output: [..., H], in x's
    dtype (promoted with weight's for "weight_last"). Raises ValueError on an accelerator where H is beyond 65536.
    """
    if x.device.type == "cuda":
        return norm_fwd(x, weight, None, eps, False, zero_centered, cast_order == "weight_last")[0]
    return reference.rms_norm(x, weight, eps, zero_centered=zero_centered, cast_order=cast_order)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    cast_order: str = "weight_first",
) -> Tensor:
    """Return `gamma * (x - mean) / sqrt(var + eps) + bias` over the last dimension, biased variance.

    x: [..., H]; weight, bias: [H] or None. Output: [..., H] in x's dtype (promoted with weight's and bias's for
    "weight_last"). Raises ValueError on an accelerator where H is beyond 65536.
    """
    if x.device.type == "cuda":
        return norm_fwd(x, weight, bias, eps, True, zero_centered, cast_order == "weight_last")[0]
    return reference.layer_norm(x, weight, bias, eps, zero_centered=zero_centered, cast_order=cast_order)
