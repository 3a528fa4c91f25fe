"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), statistics in float32 (in float64 of such x).

The one subtlety is where the product with gamma is rounded when x is bfloat16, because published families differ and
their checkpoints were trained with one of the two (it decides the last bit):
"weight_last" rounds the normalised x first, "weight_first" multiplies without rounding and rounds once.
"""

import torch
from torch import Tensor

from ..chunks import wide


def _scale_and_round(
    x_hat: Tensor, weight: Tensor | None, zero_centered: bool, cast_order: str, dtype: torch.dtype
) -> Tensor:
    if weight is None:
        return x_hat.to(dtype)
    if cast_order == "weight_last":
        gamma = weight + 1 if zero_centered else weight
        return gamma * x_hat.to(dtype)
    gamma = weight.to(wide(weight)) + 1 if zero_centered else weight.to(wide(weight))
    return (gamma * x_hat).to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False, cast_order: str = "weight_last"
) -> Tensor:
    """As the public function: `gamma * x / sqrt(mean(x^2) + eps)` over the last dimension."""
    # one use of x, whose gradient is then rounded once, and summed before what else x is used for adds to it
    exact = x.view_as(x) if x.dtype is wide(x) else x.to(wide(x))
    x_hat = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return _scale_and_round(x_hat, weight, zero_centered, cast_order, x.dtype)


def rms_norm_by(
    mean_square: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    cast_order: str = "weight_last",
) -> Tensor:
    """Return `gamma * x / sqrt(mean_square + eps)`: `rms_norm` of rows of which x is a part.

    mean_square: [..., 1] float32, of the whole rows; the other arguments as for `rms_norm`.
    """
    x_hat = x.to(wide(x)) * torch.rsqrt(mean_square + eps)
    return _scale_and_round(x_hat, weight, zero_centered, cast_order, x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    cast_order: str = "weight_first",
) -> Tensor:
    """As the public function: `gamma * (x - mean) / sqrt(var + eps) + bias`, biased variance."""
    if cast_order == "weight_first":
        gamma = weight.to(wide(weight)) + 1 if weight is not None and zero_centered else weight
        gamma, beta = (None if t is None else t.to(wide(x)) for t in (gamma, bias))
        return torch.nn.functional.layer_norm(x.to(wide(x)), x.shape[-1:], gamma, beta, eps).to(x.dtype)
    x_hat = torch.nn.functional.layer_norm(x.to(wide(x)), x.shape[-1:], None, None, eps)
    y = _scale_and_round(x_hat, weight, zero_centered, cast_order, x.dtype)
    return y if bias is None else y + bias


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(sum(x^2) + eps)` over the last dimension, in x's dtype; statistics as in norms. x: [..., H]."""
    x_f = x.to(wide(x))
    return (x_f * torch.rsqrt(x_f.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
