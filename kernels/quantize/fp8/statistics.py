"""What quantizing a tensor did to it, as float32 scalars on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from . import blocks

_ROUNDING = 1 + 2.0**-20
"""A block's own amax times its scale may come out just above the largest value; that is no saturation."""


def quantization_statistics(
    x: Tensor,
    values: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int] | None,
    largest: float,
    count: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return {"amax", "scale_min", "scale_max", "underflow", "saturation"}.

    x: [..., R, C]; values: its float32 decoded form; scale_inv: float32 per block, [..., ceil(R/br), ceil(C/bc)], or
    per matrix, [...], where block is None; largest: the format's maximum; count: how many of the elements are not mere
    padding by zeros, None: all. scale_min and scale_max are over what is multiplied with before the cast, blocks of
    zeros left out (both 1 where nothing is left). underflow: the fraction of nonzero elements that became zero;
    saturation: the fraction that were clamped, infinities included. amax is infinite or NaN where x holds that.
    """
    x = x.detach()
    amax, one = blocks.amax(x), torch.ones((), device=x.device)
    if x.numel() == 0:
        return {"amax": one * 0, "scale_min": one, "scale_max": one, "underflow": one * 0, "saturation": one * 0}
    scale = torch.div(torch.ones_like(scale_inv), scale_inv).clamp(max=torch.finfo(torch.float32).max)
    if block is None:
        per_block, spread = amax, scale[..., None, None]
    else:
        per_block, spread = blocks.blockwise_amax(x, block), blocks.per_element(scale, block, *x.shape[-2:])
    magnitude = x.abs().float()
    used, nonzero = per_block > 0, magnitude > 0
    clamped = (magnitude * spread > largest * _ROUNDING).float()
    smallest = torch.where(used, scale, float("inf")).amin()
    return {
        "amax": amax.amax(),
        "scale_min": torch.where(used.any(), smallest, one),
        "scale_max": torch.where(used.any(), torch.where(used, scale, 0.0).amax(), one),
        "underflow": (nonzero & (values == 0)).float().sum() / nonzero.float().sum().clamp(min=1.0),
        "saturation": clamped.mean() if count is None else clamped.sum() / count.clamp(min=1),
    }
