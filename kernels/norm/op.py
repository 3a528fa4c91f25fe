"""Public norms. On CPU the reference runs, fused by Inductor, or eager, keeping its inputs alone; on an accelerator two
registered kernels."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from ..backend import definitions_only
from ..cpu_rows import rms_norm as rms_norm_of_rows
from ..custom_op import FLOATS, Output, absent, like, operation, register_gradient, takes
from ..derivative import keeping_inputs
from ..launch import as_matrix
from . import reference


def output_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None, weight_last: bool) -> torch.dtype:
    """Return the dtype of a norm's result: x's, promoted with the parameters' that multiply after rounding."""
    dtype = x.dtype
    for parameter in (weight, bias) if weight_last else ():
        dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    return dtype


def statistics(x: Tensor, centered: bool) -> tuple[Output, Output]:
    """Describe the mean (absent unless centered) and the reciprocal deviation of rows x [..., H]."""
    rstd = like(x, x.shape[:-1], torch.float32)
    return rstd if centered else absent(x, torch.float32), rstd


def _results(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool, weight_last: bool
) -> tuple[Output, ...]:
    return like(x, dtype=output_dtype(x, weight, bias, weight_last)), *statistics(x, centered)


TAKES = takes(f"x: {FLOATS} [..., H]; weight: {FLOATS} [H]?; bias: {FLOATS} [H]?")


@operation("norm_fwd", _results, takes=TAKES)
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


def _gradients(
    x: Tensor, weight_grad: torch.dtype | None, bias_grad: torch.dtype | None
) -> tuple[Output, Output, Output]:
    def parameter(dtype: torch.dtype | None) -> Output:
        return absent(x) if dtype is None else like(x, x.shape[-1:], dtype)

    return like(x), parameter(weight_grad), parameter(bias_grad)


_GRADIENTS_TAKE = takes(
    f"dy: {FLOATS} [*B, H]; x: {FLOATS} [*B, H]; weight: {FLOATS} [H]?; mean: float32; rstd: float32 [*B];"
    "centered: value; not centered or mean.shape == rstd.shape"
)


@operation("norm_bwd", _gradients, takes=_GRADIENTS_TAKE)
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
    from . import triton_backward

    flags = (centered, zero_centered, weight_last, weight_grad, bias_grad)
    dx, d_weight, d_bias = triton_backward.norm_bwd(
        as_matrix(dy), as_matrix(x), weight, mean.flatten(), rstd.flatten(), *flags
    )
    return dx.view(x.shape), d_weight, d_bias


@register_gradient(
    norm_fwd,
    saves=("x", "weight", "bias.dtype", "centered", "zero_centered", "weight_last"),
    saves_results=(1, 2),
    constant=(1, 2),
)
def _backward(saved: SimpleNamespace, needs: set[str], dy: Tensor) -> dict[str, Tensor]:
    x, weight = saved.x, saved.weight
    wanted = (weight.dtype if "weight" in needs else None, saved.bias_dtype if "bias" in needs else None)
    flags = (saved.centered, saved.zero_centered, saved.weight_last)
    gradients = zip(("x", "weight", "bias"), norm_bwd(dy, x, weight, *saved.results, *flags, *wanted), strict=True)
    return {name: gradient for name, gradient in gradients if name == "x" or name in needs}


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False, cast_order: str = "weight_last"
) -> Tensor:
    """Return `gamma * x / sqrt(mean(x^2) + eps)` over the last dimension.

    x: [..., H]; weight: [H] or None; gamma is `weight`, or `1 + weight` when zero_centered. Output: [..., H], in x's
    dtype (promoted with weight's for "weight_last"). Raises ValueError on an accelerator where H is beyond 65536.
    """
    if x.device.type == "cuda" and not definitions_only() and not TAKES.misfit(x, weight, None):
        return norm_fwd(x, weight, None, eps, False, zero_centered, cast_order == "weight_last")[0]
    function = partial(eager_rms_norm, eps=eps, zero_centered=zero_centered, cast_order=cast_order)
    return keeping_inputs(function, x, weight)


def eager_rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool, cast_order: str) -> Tensor:
    """Return the definition's `rms_norm`, in one pass where no gradient is wanted and nothing traced."""
    found = rms_norm_of_rows(x, weight, eps, zero_centered, cast_order == "weight_last")
    if found is not None:
        return found
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
    if x.device.type == "cuda" and not definitions_only() and not TAKES.misfit(x, weight, bias):
        return norm_fwd(x, weight, bias, eps, True, zero_centered, cast_order == "weight_last")[0]
    function = partial(reference.layer_norm, eps=eps, zero_centered=zero_centered, cast_order=cast_order)
    return keeping_inputs(function, x, weight, bias)
