"""Quantized operands for the tests of scaled GEMMs, and the bound of their error."""

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import ScaledOperand

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
# left and right side of fprop and dgrad, and of wgrad, under each recipe
SIDES = {
    "per_tensor": (("per_tensor", None), ("per_tensor", None)),
    "pow2 1x128 by 128x128": (("pow2", (1, 128)), ("pow2", (128, 128))),
    "pow2 1x128 by 1x128": (("pow2", (1, 128)), ("pow2", (1, 128))),
    "pow2 128x128 by 1x128": (("pow2", (128, 128)), ("pow2", (1, 128))),
    "float32 1x128 by 128x128": (("float32", (1, 128)), ("float32", (128, 128))),
    "mxfp8": (("e8m0", (1, 32)), ("e8m0", (1, 32))),
    "mxfp8 1x32 by 32x32": (("e8m0", (1, 32)), ("e8m0", (32, 32))),
}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Tensor:
    """Seeded normal values; columns of very different size, so that blocks have different scales."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    spread = torch.exp2((torch.arange(shape[-1]) // 32 % 7 - 3).float()) if shape[-1] else 1.0
    return (x * spread).to(dtype).to(device)


def quantized(x: Tensor, kind: str, block: tuple[int, int] | None, fp8: torch.dtype = E4M3) -> ScaledOperand:
    """Quantize [..., outer, K]."""
    if kind == "per_tensor":
        scale = q.scale_from_amax(x.abs().amax((-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2]), fp8)
        data = q.quantize_per_tensor(x, scale[..., None, None], fp8)
        return ScaledOperand(data, 1 / scale, "per_tensor")
    if kind == "nvfp4":
        packed, scales, amax = q.quantize_nvfp4(x)
        return ScaledOperand(packed, scales, "nvfp4", (1, 16), amax)
    assert block is not None
    data, scale_inv = q.quantize_blockwise(x, block, fp8, kind)
    return ScaledOperand(data, scale_inv, kind, block)


def exact(operand: ScaledOperand) -> Tensor:
    """What the operand stands for, float64."""
    if operand.kind == "nvfp4":
        assert operand.amax is not None
        values = q.decode_blocks(operand.data, operand.scale_inv, operand.inner).double()
        return values * q.global_decode(operand.amax).double()
    if operand.block is None:
        return operand.data.double() * operand.scale_inv.double()[..., None, None]
    scale_inv = q.e8m0_to_float(operand.scale_inv) if operand.kind == "e8m0" else operand.scale_inv
    rows = torch.arange(operand.outer, device=scale_inv.device) // operand.block[0]
    columns = torch.arange(operand.inner, device=scale_inv.device) // operand.block[1]
    return operand.data.double() * scale_inv.double()[..., rows, :][..., columns]


def assert_within(y: Tensor, left: Tensor, right: Tensor, *, roundings: int = 1, unit: float | None = None) -> None:
    """|y - left @ right^T| is at most K float32 roundings of the sums, and `roundings` to y's dtype (or of `unit`).

    Triton's interpreter truncates to bfloat16 where a GPU rounds: twice the unit."""
    unit = UNIT[y.dtype] if unit is None else unit
    if y.device.type == "cpu" and y.dtype == torch.bfloat16:
        unit *= 2
    magnitudes = left.abs() @ right.abs().mT
    bound = ((left.shape[-1] + 8) * UNIT[torch.float32] + roundings * unit) * magnitudes
    assert ((y.double() - left @ right.mT).abs() <= bound + 1e-30).all()
