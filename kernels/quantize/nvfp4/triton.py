"""NVFP4 quantization: both copies of a matrix in one pass over it, once their amaxes are known.

The columnwise copy is made of the transposed tile, so one device function makes both. Grouped rows as in
`triton_blockwise`.
"""

# A kernel takes plain values for the constexpr parameters that choose its branches; triton's types know neither.
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..output import nvfp4_copies, nvfp4_slots
from ..triton_hadamard import hadamard
from ..triton_rounding import (
    clamp,
    encode_e2m1,
    encode_e2m1_stochastic,
    from_e4m3,
    magnitude_bits,
    native_fp8,
    nvfp4_global_encode,
    random_tile,
    reciprocal,
    to_fp8,
)
from ..triton_tiles import autotuned, grouped_tiles, size_class, store_tile, tile_of_group
from .reference import BLOCK


@triton.jit
def nvfp4_codes(x, encode, random, BLOCK_ROWS: tl.constexpr, STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr):
    """Quantize the blocks [BLOCK_ROWS, 16] of a float32 tile: return codes [A, B] and E4M3 scale bytes [A, B / 16].

    encode: the global factor, a scalar or one per block; random: bits [A, B] where STOCHASTIC.
    """
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    shape: tl.constexpr = (A // BLOCK_ROWS, BLOCK_ROWS, B // 16, 16)
    amax = tl.max(tl.max(tl.reshape(magnitude_bits(x), shape), axis=3), axis=1).to(tl.float32, bitcast=True)
    sixth: tl.constexpr = 1.0 / 6.0
    scales = to_fp8(amax * (encode * sixth), True, NATIVE)
    decode = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode + tl.zeros(amax.shape, tl.float32))
    factor = reciprocal(from_e4m3(scales.to(tl.int32)) * decode)
    factor = tl.where(factor == float("inf"), 3.4028234663852886e38, factor)
    scaled = tl.reshape(clamp(tl.reshape(x, shape) * factor[:, None, :, None], 6.0), (A, B))
    codes = encode_e2m1_stochastic(scaled, random) if STOCHASTIC else encode_e2m1(scaled)
    every_row = tl.broadcast_to(scales[:, None, :], (A // BLOCK_ROWS, BLOCK_ROWS, B // 16))
    return codes, tl.reshape(every_row, (A, B // 16))


@triton.jit
def pack(codes):
    """Put two codes (int32) in a byte, the even one in the low half: [A, B] -> [A, B / 2]."""
    even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def store_copy(
    packed_ptr,
    scale_ptr,
    x,
    encode,
    key_ptr,
    stream,
    index_row,
    first_row,
    first_block,
    end_row,
    width,
    packed_width,
    scale_width,
    end_column,
    end_packed,
    end_scale,
    BLOCK_ROWS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize and store the tile of a copy of `width` columns at row first_row, column 16 first_block, the part before
    (end_row, end_column). index_row: the tile's first row counted over all matrices, for the random bits.

    Positions are counted in blocks and ends are given in each unit: a compiler that sees a multiple of 8, not a
    division, stores eight bytes at once."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    first_column = first_block * 16
    random = random_tile(key_ptr, stream, index_row, first_column, width, A, B, ALIGNED) if STOCHASTIC else 0
    codes, scales = nvfp4_codes(x, encode, random, BLOCK_ROWS, STOCHASTIC, NATIVE)
    # past the end there are zeros, but zero times a scale of NaN has a code
    codes = tl.where((first_column + tl.arange(0, B) < end_column)[None, :], codes, 0)
    store_tile(packed_ptr, pack(codes), first_row, first_block * 8, end_row, end_packed, packed_width, 1)
    store_tile(scale_ptr, scales, first_row, first_block, end_row, end_scale, scale_width, 1)


@triton.jit(do_not_specialize=["size_class", "row_stream", "col_stream"])
def quantize_nvfp4_kernel(
    x_ptr,
    row_packed_ptr,
    row_scale_ptr,
    row_amax_ptr,
    col_packed_ptr,
    col_scale_ptr,
    col_amax_ptr,
    m_splits_ptr,
    key_ptr,
    rows,
    slots,
    columns,
    row_width,
    row_scale_width,
    col_width,
    col_scale_width,
    amax_stride_m,
    amax_stride_r,
    amax_stride_c,
    row_stream,
    col_stream,
    size_class,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    RHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ROW_ALIGNED: tl.constexpr,
    COL_ALIGNED: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """One tile of x: [B, R, C], or of grouped rows [R, C] where G > 0. slots: the columnwise copy's columns; widths:
    bytes and scales in a row of a copy. The rowwise amax is one per matrix or group; PER_BLOCK: one per block. ALIGNED:
    a copy has a multiple of 4 columns."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles = tl.cdiv(columns, TILE_C)
    column_block = program % column_tiles * (TILE_C // 16)
    first_column = column_block * 16
    tile = program // column_tiles
    if G > 0:
        matrix, first_row, end_row, first_slot, end_slot = tile_of_group(
            m_splits_ptr, tile, rows, slots, G, G_BLOCK, TILE_R, 16
        )
        in_matrix = matrix < G
        index_row, index_column, slot_block = first_row, first_column, first_slot // 16
        end_packed, end_scale = end_slot // 16 * 8, end_slot // 16
    else:
        row_tiles = tl.cdiv(rows, TILE_R)
        matrix = tile // row_tiles
        first_row = tile % row_tiles * TILE_R
        end_row, slot_block, end_slot = rows, tile % row_tiles * (TILE_R // 16), slots
        end_packed, end_scale = col_width, col_scale_width
        in_matrix = matrix >= 0
        index_row, index_column = matrix * rows + first_row, matrix * columns + first_column
        x_ptr += matrix * rows * columns
        if ROWWISE:
            row_packed_ptr += matrix * rows * row_width
            row_scale_ptr += matrix * rows * row_scale_width
        if COLUMNWISE:
            col_packed_ptr += matrix * columns * col_width
            col_scale_ptr += matrix * columns * col_scale_width
    r = first_row + tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    inside = (r < end_row)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0)
    if ROWWISE:
        if PER_BLOCK:
            br = first_row // BLOCK_ROWS + tl.arange(0, TILE_R // BLOCK_ROWS)
            bc = column_block + tl.arange(0, TILE_C // 16)
            at = matrix * amax_stride_m + br[:, None] * amax_stride_r + bc[None, :] * amax_stride_c
            has_block = (br * BLOCK_ROWS < rows)[:, None] & (bc * 16 < columns)[None, :]
            encode = nvfp4_global_encode(tl.load(row_amax_ptr + at, mask=has_block, other=0.0))
        else:
            encode = nvfp4_global_encode(tl.load(row_amax_ptr + matrix * amax_stride_m, mask=in_matrix, other=0.0))
        store_copy(
            row_packed_ptr,
            row_scale_ptr,
            x.to(tl.float32),
            encode,
            key_ptr,
            row_stream,
            index_row,
            first_row,
            column_block,
            end_row,
            columns,
            row_width,
            row_scale_width,
            columns,
            row_width,
            row_scale_width,
            BLOCK_ROWS,
            STOCHASTIC,
            ROW_ALIGNED,
            NATIVE,
        )
    if COLUMNWISE:
        if RHT:
            x = x.to(tl.bfloat16)
        x = tl.trans(x.to(tl.float32))
        if G > 0:
            # rows past the last group are in no padded row
            x = tl.where(matrix < G, x, 0.0)
        if RHT:
            x = hadamard(x)
        encode = nvfp4_global_encode(tl.load(col_amax_ptr + matrix, mask=in_matrix, other=0.0))
        store_copy(
            col_packed_ptr,
            col_scale_ptr,
            x,
            encode,
            key_ptr,
            col_stream,
            index_column,
            first_column,
            slot_block,
            columns,
            slots,
            col_width,
            col_scale_width,
            end_slot,
            end_packed,
            end_scale,
            1,
            STOCHASTIC,
            COL_ALIGNED,
            NATIVE,
        )


def _fits(arguments: dict, tile_r: int, tile_c: int) -> bool:
    # a larger tile, or one whose elements draw four words of random bits each, does not fit in registers
    aligned = arguments["ROW_ALIGNED"] and arguments["COL_ALIGNED"]
    return tile_r * tile_c <= (8192 if aligned or not arguments["STOCHASTIC"] else 2048)


_kernel = autotuned(
    quantize_nvfp4_kernel,
    _fits,
    key=("columns", "size_class", "ROWWISE", "COLUMNWISE", "RHT", "STOCHASTIC", "BLOCK_ROWS", "COL_ALIGNED"),
)


def quantize_nvfp4(
    x: Tensor,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    *,
    m_splits: Tensor | None = None,
    key: Tensor | None = None,
    streams: tuple[int, int] = (0, 1),
    block_rows: int = 1,
    with_rht: bool = False,
) -> list[Tensor]:
    """Return packed codes and scales of each copy whose amax is given: rowwise by block_rows x 16, then columnwise.

    x: [..., R, C]; row_amax: [...], or broadcastable to the blocks [..., R / block_rows, C / 16]; col_amax: [...]. With
    m_splits [G] integer: grouped rows [R, C], amaxes [G], as `nvfp4_copies.quantize_grouped_nvfp4`.
    """
    x = x.contiguous()
    *batch, rows, columns = x.shape
    groups = 0 if m_splits is None else m_splits.shape[0]
    rowwise, columnwise = row_amax is not None, col_amax is not None
    copies = nvfp4_copies(x, rowwise=rowwise, columnwise=columnwise, with_rht=with_rht, groups=groups)
    out = [copy.empty() for copy in copies]
    if x.numel() == 0:
        return out
    pointers = [t.view(torch.uint8) for t in out]
    row = pointers[:2] if rowwise else [None, None]
    col = pointers[-2:] if columnwise else [None, None]
    per_block = row_amax is not None and not groups and row_amax.dim() == x.dim()
    strides = (1, 0, 0)
    if row_amax is not None and per_block:
        row_amax = row_amax.expand(*batch, triton.cdiv(rows, block_rows), triton.cdiv(columns, BLOCK))
        row_amax = row_amax.reshape(x.shape[:-2].numel(), *row_amax.shape[-2:])
        strides = row_amax.stride()
    elif row_amax is not None:
        row_amax = row_amax.contiguous()
    slots = nvfp4_slots(rows, with_rht=with_rht, groups=groups)

    def programs(meta: dict) -> tuple[int]:
        tile = meta["TILE_R"]
        matrices = x.shape[:-2].numel()
        tiles = grouped_tiles(rows, groups, BLOCK, tile) if groups else matrices * triton.cdiv(rows, tile)
        return (tiles * triton.cdiv(columns, meta["TILE_C"]),)

    _kernel[programs](
        x,
        *row,
        row_amax,
        *col,
        None if col_amax is None else col_amax.contiguous(),
        None if m_splits is None else m_splits.contiguous(),
        None if key is None else key.contiguous(),
        rows,
        slots,
        columns,
        triton.cdiv(columns, 2),
        triton.cdiv(columns, BLOCK),
        triton.cdiv(slots, 2),
        triton.cdiv(slots, BLOCK),
        *strides,
        *streams,
        size_class(x.numel()),
        ROWWISE=rowwise,
        COLUMNWISE=columnwise,
        RHT=with_rht,
        STOCHASTIC=key is not None,
        BLOCK_ROWS=block_rows,
        PER_BLOCK=per_block,
        ROW_ALIGNED=columns % 4 == 0,
        COL_ALIGNED=slots % 4 == 0,
        G=groups,
        G_BLOCK=triton.next_power_of_2(max(groups, 1)),
        NATIVE=native_fp8(x.device),
    )
    return out
