"""Scaled GEMMs of the vendor's library, by way of torch: which it takes, and the layouts it wants.

cuBLASLt multiplies a row-major left by a column-major right side: both with K contiguous. Its scale layouts:
1x128 blocks [outer, K/128] with the outer dimension contiguous; 128x128 blocks with K/128 contiguous and padded to a
multiple of 4; 1x32 and 1x16 blocks in tiles of 128 x 4 scales ("32_4_4"), padded to whole tiles.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from .. import quantize as q
from .backends import DeviceCapability
from .operand import ScaledOperand, k_contiguous

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reason_against(
    left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype, hw: DeviceCapability
) -> str | None:
    """Return why the library cannot multiply these, None where it can."""
    if hw.type != "cuda":
        return f"it needs a CUDA device, this is {hw.type}"
    if left.outer == 0 or right.outer == 0 or left.inner == 0:
        return "the product is empty"
    if right.outer % 16 or left.inner % 16:
        return f"N {right.outer} and K {left.inner} must be multiples of 16"
    if out_dtype not in _OUT_DTYPES:
        return f"it does not write {out_dtype}"
    kinds = {left.kind, right.kind}
    if kinds == {"per_tensor"}:
        if hw.capability < (8, 9):
            return f"FP8 needs compute capability 8.9, this is {hw}"
        e5m2 = left.data.dtype == right.data.dtype == torch.float8_e5m2
        return "it does not multiply E5M2 by E5M2" if e5m2 else None
    if kinds <= {"float32", "pow2"}:
        return _against_blocks(left, right, hw)
    if kinds in ({"e8m0"}, {"nvfp4"}):
        return _against_microscaling(left, right, hw)
    return f"it does not multiply {left.kind} by {right.kind}"


def _against_blocks(left: ScaledOperand, right: ScaledOperand, hw: DeviceCapability) -> str | None:
    if hw.capability[0] != 9 or hw.cuda < (12, 9):
        return f"128-blocks need compute capability 9.x and CUDA 12.9, this is {hw} with CUDA {hw.cuda[0]}.{hw.cuda[1]}"
    if not left.data.dtype == right.data.dtype == torch.float8_e4m3fn:
        return "128-blocks need E4M3 on both sides"
    if {left.block, right.block} not in ({(1, 128)}, {(1, 128), (128, 128)}):
        return f"it does not multiply blocks {left.block} by {right.block}"
    if left.inner % 128:
        return f"K {left.inner} must be a multiple of 128"
    if left.outer % 4:
        return f"M {left.outer} must be a multiple of 4"
    return None


def _against_microscaling(left: ScaledOperand, right: ScaledOperand, hw: DeviceCapability) -> str | None:
    if hw.capability[0] < 10:
        return f"{left.kind} blocks need compute capability 10.0, this is {hw}"
    if not {left.block, right.block} <= {(1, 32), (32, 32), (1, 16)}:
        return f"it does not multiply blocks {left.block} by {right.block}"
    if left.inner % 32:
        return f"K {left.inner} must be a multiple of 32"
    if left.kind == "e8m0" and not left.data.dtype == right.data.dtype == torch.float8_e4m3fn:
        return "1x32 blocks need E4M3 on both sides"
    return None


def tiled_32_4_4(scales: Tensor) -> Tensor:
    """Return [R, C] one-byte scales in the hardware's order, flat: tiles of 128 x 4, padded with zero bytes.

    In a tile, row 32 i + j and column k are at byte 16 j + 4 i + k.
    """
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view((rows + 127) // 128, 4, 32, (columns + 3) // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1)


def _contiguous_outer(scales: Tensor) -> Tensor:
    """Return [outer, K/128] with strides (1, outer), also where a dimension is 1 and torch calls it contiguous."""
    rows, columns = scales.shape
    return scales.t().contiguous().as_strided((rows, columns), (1, rows))


def _padded_inner(scales: Tensor) -> Tensor:
    """Return [outer/128, K/128] as [K/128 rounded up to a multiple of 4, outer/128], the former contiguous.

    Without the padding the library reads past a row: wrong numbers, no error.
    """
    rows, columns = scales.shape
    length = -(-columns // 4) * 4
    return F.pad(scales, (0, length - columns)).contiguous().as_strided((length, rows), (1, length))


def _scales(operand: ScaledOperand) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    """Return scales, their recipes and their orders as torch's scaled GEMM wants them."""
    unswizzled, tiled = SwizzleType.NO_SWIZZLE, SwizzleType.SWIZZLE_32_4_4
    if operand.kind == "per_tensor":
        return [operand.scale_inv.reshape(1)], [ScalingType.TensorWise], [unswizzled]
    if operand.kind == "e8m0":
        # a 32x32 block is 32 blocks of 1x32 with one scale
        rows = operand.scale_inv
        if operand.block == (32, 32):
            rows = rows.repeat_interleave(32, 0)[: operand.outer]
        return [tiled_32_4_4(rows).view(torch.float8_e8m0fnu)], [ScalingType.BlockWise1x32], [tiled]
    if operand.kind == "nvfp4":
        assert operand.amax is not None
        scales = [tiled_32_4_4(operand.scale_inv).view(torch.float8_e4m3fn), q.global_decode(operand.amax).reshape(1)]
        return scales, [ScalingType.BlockWise1x16, ScalingType.TensorWise], [tiled, unswizzled]
    if operand.block == (1, 128):
        return [_contiguous_outer(operand.scale_inv)], [ScalingType.BlockWise1x128], [unswizzled]
    return [_padded_inner(operand.scale_inv)], [ScalingType.BlockWise128x128], [unswizzled]


def _readable(data: Tensor) -> Tensor:
    """Return data as the library reads it: K contiguous, rows at multiples of 16 bytes. Rows of a slice of a wider
    matrix may begin elsewhere and are copied."""
    data = k_contiguous(data)
    aligned = data.stride(0) % 16 == 0 and data.data_ptr() % 16 == 0
    return data if aligned else data.clone(memory_format=torch.contiguous_format)


def scaled_gemm(
    left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype, bias: Tensor | None, split_accumulation: bool
) -> Tensor:
    """Return `left @ right^T + bias`, for operands that `reason_against` has nothing against."""
    a, b = _readable(left.data), _readable(right.data)
    if left.kind == "nvfp4":
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    # only a per-tensor GEMM with a bfloat16 result is known to take a bias of its dtype everywhere
    fused = bias is not None and left.kind == "per_tensor" and out_dtype == bias.dtype == torch.bfloat16
    scale_a, recipe_a, order_a = _scales(left)
    scale_b, recipe_b, order_b = _scales(right)
    y = F.scaled_mm(
        a,
        b.t(),
        scale_a,
        recipe_a,
        scale_b,
        recipe_b,
        swizzle_a=order_a,
        swizzle_b=order_b,
        bias=bias if fused else None,
        output_dtype=out_dtype,
        use_fast_accum=left.kind == "per_tensor" and not split_accumulation,
    )
    return y if bias is None or fused else (y + bias).to(out_dtype)
