"""Rotary position embedding (arXiv 2104.09864): turn channel pairs of q and k by an angle that grows with position.

B batch, S sequence, N heads, D head channels, R rotated channels (R <= D, the rest passes through).

Tables are half-width [.., R/2]: both members of a pair share their angle, so the full-width tables that many
implementations carry hold everything twice. The pairs are (i, i + R/2) for style "half", (2i, 2i + 1) for
"interleaved". Rounding: everything is float32 until the result is rounded to x's dtype (float64 of such x, tables
aside). Published implementations round the tables to x's dtype first. That only adds error, and a fusing compiler drops
it, so that their compiled and eager results differ; in float32 the two are the same to the last bit.
"""

import torch
from torch import Tensor

from te_models.suggestions import check_choice

from ..chunks import wide


def rope_tables(position_ids: Tensor, frequencies: Tensor, attention_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles, float32 [B, S, R/2], times attention_factor.

    position_ids: [B, S] integer; frequencies: [R/2] float32 from `rope_frequencies`.
    """
    angles = position_ids[..., None].float() * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


_STYLES = ("half", "interleaved")


def check_rope(x: Tensor, cos: Tensor, style: str) -> None:
    """Raise ValueError for a style that does not exist or tables wider than x."""
    if style not in _STYLES:
        check_choice("style", style, _STYLES)
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"the tables rotate {2 * cos.shape[-1]} channels, but x has {x.shape[-1]}")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str = "half") -> Tensor:
    """As the public function: x [B, S, N, D], its first R channels rotated."""
    rotated = 2 * cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    turning = x[..., :rotated]
    a, b = turning.chunk(2, dim=-1) if style == "half" else turning.unflatten(-1, (-1, 2)).unbind(-1)
    dtype = wide(x)
    a, b = a.to(dtype), b.to(dtype)
    # Rounding each half before joining them moves half the bytes of joining in float32.
    halves = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    if style == "half":
        return torch.cat((*halves, x[..., rotated:]), dim=-1) if rotated < x.shape[-1] else torch.cat(halves, dim=-1)
    halves = torch.stack(halves, dim=-1).flatten(-2)
    return torch.cat((halves, x[..., rotated:]), dim=-1) if rotated < x.shape[-1] else halves
