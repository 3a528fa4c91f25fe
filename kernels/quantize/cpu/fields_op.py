"""What a CPU graph stores quantized for its backward pass: matrices, written and read by one operation each.

The graph would store the values themselves, in twice the memory, and round them again in the backward pass.
"""

import torch
from torch import Tensor

from ...backend import Backend, choose, has_library
from ...custom_op import Output, like, operation, takes
from ..eager import plain_on_cpu
from ..fp8 import blocks, reference
from ..fp8.cpu import fp8_to_float
from ..nvfp4 import cpu as nvfp4
from . import fields, rounding
from .rounding_op import matrix_amax

E4M3 = torch.float8_e4m3fn


def _in_one_pass(x: Tensor) -> bool:
    return choose(fields.FIELDS, x) is Backend.COMPILED


def _blocks(x: Tensor, block: list[int], scale_kind: str) -> tuple[Output, Output]:
    rows, columns = x.shape
    scales = torch.uint8 if scale_kind == "e8m0" else torch.float32
    grid = blocks.grid(rows, columns, (block[0], block[1]))
    return like(x, dtype=E4M3), like(x, grid if block[0] == 1 else (grid[0] * grid[1],), scales)


_MATRIX = takes("x: any [R, C]")
_STORED = takes(
    "data: float8_e4m3fn [R, C]; block: value; scales: float32|uint8;"
    "scales.numel() == -(-R // block[0]) * -(-C // block[1])"
)
_PACKED = takes("packed: uint8 [R, P]; scales: float8_e4m3fn [R, -(-P // 8)]")


@operation("store_blocks", _blocks, takes=_MATRIX, cpu_only=True)
def store_blocks(x: Tensor, block: tuple[int, int], scale_kind: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_blockwise` of x [R, C] to E4M3, the scales of blocks of several rows as one line: a graph asks
    of every size whether it is 1, and would be another one where all rows are in a single block."""
    found = None
    if _in_one_pass(x):
        found = fields.quantize_blocks(x.contiguous(), block, scale_kind, epsilon, measured=False)
    if found is None:
        found = reference.quantize_blockwise(x, block, E4M3, scale_kind, epsilon=epsilon)
    data, scales = found[0].contiguous(), found[1].contiguous()
    return data, scales if block[0] == 1 else scales.flatten()


@operation("read_blocks", lambda data, dtype: like(data, dtype=dtype), takes=_STORED, cpu_only=True)
def read_blocks(data: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return `dequantize_blockwise` of E4M3 data [R, C]. scales: as a grid, or as one line."""
    scales = scales.view(blocks.grid(data.shape[0], data.shape[1], block)) if scales.dim() == 1 else scales
    if choose(fields.FIELDS, data, dtype) is Backend.COMPILED:
        return fields.decode_fp8_blocks(data, scales, block, dtype)
    return reference.dequantize_blockwise(data, scales, block, dtype)


def decoded(data: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """Return E4M3 data [R, C] times its scales by the library or `read_blocks`; None for the definition."""
    chosen = choose(fields.FIELDS, data, dtype) if data.dtype is E4M3 and data.dim() == 2 else Backend.DEFINITION
    if chosen is Backend.COMPILED and data.is_contiguous():
        return fields.decode_fp8_blocks(data, scales, block, dtype)
    return read_blocks(data, scales, block, dtype) if chosen is Backend.OPERATION else None


@operation(
    "read_numbers",
    lambda data, dtype: like(data, dtype=dtype),
    takes=takes("data: float8_e4m3fn [R, C]"),
    cpu_only=True,
)
def read_numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return E4M3 data [R, C] in `dtype`, still scaled: an operation, or the graph would store what it returns."""
    if choose(fields.FIELDS, data, dtype) is Backend.COMPILED:
        one = torch.ones(1, 1, dtype=torch.float32, device=data.device)
        return fields.decode_fp8_blocks(data, one, (data.shape[0], data.shape[1]), dtype)
    return fp8_to_float(data).to(dtype)


def _packed(x: Tensor) -> tuple[Output, Output, Output]:
    rows, columns = x.shape
    return like(x, (rows, columns // 2), torch.uint8), like(x, (rows, columns // 16), E4M3), like(x, (), torch.float32)


@operation("store_nvfp4", _packed, takes=takes("x: any [R, C]; C % 16 == 0"), cpu_only=True)
def store_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed values, scales and amax of x [R, C] in 1x16 blocks, C a multiple of 16, rounded to nearest."""
    if _in_one_pass(x):
        amax = matrix_amax(x)
        found = fields.quantize_nvfp4(x.contiguous(), 1, float(amax), measured=False)
        if found is not None:
            return *found[:2], amax
    packed, scales, amax = nvfp4.quantize_nvfp4(x)
    return packed.contiguous(), scales.contiguous(), amax


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Output:
    return like(packed, (packed.shape[0], 2 * packed.shape[1]), dtype)


@operation("read_nvfp4", _unpacked, takes=_PACKED, cpu_only=True)
def read_nvfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `store_nvfp4` made in `dtype`, still scaled by the amax: [R, C]."""
    if choose(fields.FIELDS, packed, dtype) is Backend.COMPILED:
        return fields.decode_nvfp4(packed, scales, dtype)
    return nvfp4.decode_blocks(packed, scales, 2 * packed.shape[1]).to(dtype)


def _current(x: Tensor, dtype: torch.dtype) -> tuple[Output, Output, Output]:
    return like(x, dtype=dtype), like(x, dtype=E4M3), like(x, (), torch.float32)


@operation("store_current", _current, takes=_MATRIX, cpu_only=True)
def store_current(x: Tensor, pow2: bool, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scale x [R, C] by its own amax: return the E4M3 numbers in `dtype`, the same as E4M3, and what to multiply with
    when dequantizing, float32 [].

    Both, because a graph that decodes the latter in its forward pass would store what it decoded.
    """
    amax = matrix_amax(x) if _in_one_pass(x) else blocks.amax(x)
    scale = reference.scale_from_amax(amax, E4M3, pow2=pow2, epsilon=epsilon)
    return *_scaled(x, scale, dtype), torch.div(torch.ones_like(scale), scale)


_SCALED = takes("x: any [R, C]; scale: float32; scale.numel() == 1")


@operation("store_scaled", lambda x, dtype: (like(x, dtype=dtype), like(x, dtype=E4M3)), takes=_SCALED, cpu_only=True)
def store_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [R, C] times a scale as E4M3 numbers in `dtype`, and as E4M3. scale: float32, one number."""
    return _scaled(x, scale, dtype)


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if _in_one_pass(x) and plain_on_cpu(scale) and has_library(rounding.ROUND_SCALED, x.dtype, dtype):
        found = fields.quantize_scaled(x.contiguous(), float(scale), 1.0, measured=False)
        if found is not None:
            return rounding.round_scaled(x, scale, E4M3, dtype), found[0]
    data = reference.quantize_per_tensor(x, scale, E4M3).contiguous()
    return data.to(dtype), data
