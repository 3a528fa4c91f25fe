"""NVFP4 with two candidates per block: its largest value becomes 6, as everywhere else, or 4 (four over six).

Between 4 and 6 E2M1 has nothing, so a block with many values near 5/6 of its largest one is better off with that one at
4. Both are quantized, and the smaller error over the block decides; a tie is 6's (arXiv 2512.02010; rounding, order of
sums and e4m3_max as NVIDIA's reference has them):

    global_encode = e4m3_max * 6 / amax              (e4m3_max 256: room for the scale of 4, 1.5 times as large; or 448)
    scale_6       = e4m3(clamp(block_amax / 6 * global_encode))
    scale_4       = e4m3(clamp(block_amax / 6 * global_encode * 1.5))
    value         = e2m1(clamp(x / (scale / global_encode)))
    error         = sum |value * scale * amax / (6 * e4m3_max) - x|, or of its squares

The error is summed in float32 along the 16 columns in their order, then down the 16 rows of a 16x16 block as a tree:
rows i and i + 8, then i and i + 4, and so on. Layouts as in `reference`. These are operations of torch on every
device; it has no separate kernel.
"""

from typing import Literal

import torch
from torch import Tensor

from ...torch_versions import saturating_cast
from ..fp8 import blocks
from ..fp8.cpu import fp8_to_float
from . import reference
from .reference import BLOCK

ErrorMode = Literal["MAE", "MSE"]


def quantize_four_over_six(
    x: Tensor, *, block_rows: int = 1, amax: Tensor | None = None, e4m3_max: int = 448, err_mode: ErrorMode = "MAE"
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks of 1x16 or 16x16 (block_rows) along the last dimension: return (packed, scales, amax).

    x: [..., R, C]; amax: see `reference.quantize_nvfp4`; e4m3_max: 448 or 256; err_mode: "MAE" or "MSE". The values are
    decoded with `reference.global_decode(amax, e4m3_max)`.
    """
    block = reference.block_shape(block_rows)
    amax = blocks.amax(x) if amax is None else amax
    if x.numel() == 0:
        return reference.quantize_nvfp4(x, block_rows=block_rows, amax=amax)
    rows, columns = x.shape[-2:]
    block_amax = blocks.blockwise_amax(x, block)
    encode = reference.broadcast_to_blocks(reference.global_encode(amax, e4m3_max), block_amax)
    by_six = torch.div(block_amax, 6.0) * encode
    wide = blocks.to_blocks(x.float(), block)
    codes_six, scales_six, error_six = _candidate(wide, by_six, encode, amax, e4m3_max, err_mode)
    codes_four, scales_four, error_four = _candidate(wide, by_six * 1.5, encode, amax, e4m3_max, err_mode)
    four = error_four < error_six
    codes = torch.where(four[..., :, None, :, None], codes_four, codes_six).flatten(-4, -3).flatten(-2)
    scales = torch.where(four, scales_four.view(torch.uint8), scales_six.view(torch.uint8))
    scales = blocks.repeat(scales, -2, block_rows, rows).contiguous().view(torch.float8_e4m3fn)
    return reference.pack(codes[..., :rows, :columns]), scales, amax


def _candidate(
    x: Tensor, scale: Tensor, encode: Tensor, amax: Tensor, e4m3_max: int, err_mode: ErrorMode
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks x [..., r, br, c, 16] by their scales [..., r, c]: return (codes, scales, errors [..., r, c])."""
    scales = saturating_cast(scale, torch.float8_e4m3fn)
    wide = fp8_to_float(scales)
    divisor = wide * torch.div(torch.ones_like(encode), encode)
    factor = torch.div(torch.ones_like(divisor), divisor).clamp(max=torch.finfo(torch.float32).max)
    codes = reference.encode_e2m1((x * factor[..., :, None, :, None]).clamp(-6.0, 6.0))
    values = reference.decode_e2m1(codes) * wide[..., :, None, :, None]
    values = values * reference.broadcast_to_blocks(amax, scale)[..., :, None, :, None] / (6.0 * float(e4m3_max))
    difference = values - x
    error = difference * difference if err_mode == "MSE" else difference.abs()
    along = error[..., 0]
    for column in range(1, BLOCK):
        along = along + error[..., column]
    while along.shape[-2] > 1:  # [..., r, br, c]
        upper, lower = along.chunk(2, -2)
        along = upper + lower
    return codes, scales, along.squeeze(-2)
