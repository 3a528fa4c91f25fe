"""Quantization to NVFP4 and back: registered Triton kernels on an accelerator, else the references, the same bits."""

from functools import partial

import torch
from torch import Tensor

from ... import launch
from ...backend import definitions_only
from ...custom_op import FLOATS, INTEGERS, Output, expands, like, operation, takes
from .. import hadamard
from ..fp8.op import amax as largest
from ..fp8.op import grouped_amax
from ..output import nvfp4_copies
from . import copies, cpu
from .four_over_six import ErrorMode, quantize_four_over_six
from .reference import block_shape


def _transformed(x: Tensor, dim: int) -> Output:
    shape = list(x.shape)
    shape[dim] = -(-shape[dim] // hadamard.SIZE) * hadamard.SIZE
    return like(x, shape)


@operation(
    "random_hadamard",
    _transformed,
    reference=hadamard.random_hadamard,
    takes=takes("x: bfloat16 [..., R, C]; dim: value; dim in (-1, -2)"),
)
def random_hadamard(x: Tensor, dim: int = -1) -> Tensor:
    """Transform groups of 16 along `dim` (-1 or -2): bfloat16 to bfloat16, sums in float32 in a fixed order.

    The dimension comes back rounded up to a multiple of 16; what is past a ragged end counts as zero. Raises ValueError
    for another dtype.
    """
    from .. import triton_hadamard

    hadamard.check_hadamard_dtype(x)
    return triton_hadamard.random_hadamard(x, dim)


def _amaxes_of(x: Tensor, m_splits: Tensor | None) -> tuple[Output, Output]:
    amax = like(x, x.shape[:-2] if m_splits is None else m_splits.shape, torch.float32)
    return amax, amax


@operation("nvfp4_amaxes", _amaxes_of, takes=takes(f"x: {FLOATS} [..., R, C]; m_splits: {INTEGERS} [_]?"))
def _transformed_amaxes(x: Tensor, m_splits: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `triton_hadamard.nvfp4_amaxes`."""
    from .. import triton_hadamard

    return triton_hadamard.nvfp4_amaxes(x, m_splits)


def _copies_of(
    x: Tensor, row_amax: Tensor | None, col_amax: Tensor | None, m_splits: Tensor | None, with_rht: bool
) -> list[Output]:
    wanted = {"rowwise": row_amax is not None, "columnwise": col_amax is not None}
    groups = 0 if m_splits is None else m_splits.shape[0]
    return nvfp4_copies(x, **wanted, with_rht=with_rht, groups=groups)


_COPIES_TAKE = takes(
    f"x: {FLOATS} [*B, R, C]; row_amax: float32?; col_amax: float32?; m_splits: {INTEGERS} [_]?; key: int64 [2]?;"
    "block_rows: value; col_amax is None or col_amax.shape == (B if m_splits is None else m_splits.shape);"
    "row_amax is None or row_amax.shape == (B if m_splits is None else m_splits.shape) or m_splits is None and"
    "  row_amax.dim() == x.dim() and expands(row_amax, (*B, -(-R // block_rows), -(-C // 16)))",
    expands=expands,
)


@operation("quantize_nvfp4", _copies_of, takes=_COPIES_TAKE)
def _copies(
    x: Tensor,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    m_splits: Tensor | None,
    key: Tensor | None,
    row_stream: int,
    col_stream: int,
    block_rows: int,
    with_rht: bool,
) -> list[Tensor]:
    """Make the copies that have an amax; see `triton.quantize_nvfp4`."""
    from . import triton

    flags = {"m_splits": m_splits, "key": key, "block_rows": block_rows, "with_rht": with_rht}
    return triton.quantize_nvfp4(x, row_amax, col_amax, streams=(row_stream, col_stream), **flags)


def quantize_nvfp4(
    x: Tensor, *, block_rows: int = 1, amax: Tensor | None = None, key: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks of 1x16 or 16x16 (block_rows) along the last dimension: return (packed, scales, amax).

    amax: the amax of each matrix if known, [...]; or of each block, broadcastable to [..., R / block_rows, C / 16], for
    matrices that lie side by side. key, stream: round stochastically with `random_bits(key, stream, x.shape)`; None
    rounds to nearest even. A 16x16 block's scale is written for each of its rows.
    """
    if not (x.is_cuda or launch.as_accelerator) or definitions_only():
        return cpu.quantize_nvfp4(x, block_rows=block_rows, amax=amax, key=key, stream=stream)
    block_shape(block_rows)
    known: Tensor = largest(x) if amax is None else amax
    packed, scales = _copies(x, known, None, None, key, stream, 0, block_rows, False)
    return packed, scales, known


def quantize_nvfp4_transposed(
    x: Tensor, *, with_rht: bool = False, amax: Tensor | None = None, key: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columnwise copy of x [..., R, C]: packed [..., C, ceil(R / 2)], scales [..., C, ceil(R / 16)], amax.

    with_rht: of the random Hadamard transform along the rows, their number rounded up to a multiple of 16. amax:
    [...], the amax of the transformed matrices, if known. key, stream: as for `quantize_nvfp4`, of the transpose.
    """
    if not (x.is_cuda or launch.as_accelerator) or definitions_only():
        return copies.quantize_nvfp4_transposed(x, with_rht=with_rht, amax=amax, key=key, stream=stream)
    amax = _amaxes(x, None, with_rht)[1] if amax is None else amax
    packed, scales = _copies(x, None, amax, None, key, 0, stream, 1, with_rht)
    return packed, scales, amax


def _amaxes(x: Tensor, m_splits: Tensor | None, with_rht: bool) -> tuple[Tensor, Tensor]:
    if with_rht:
        return _transformed_amaxes(x, m_splits)
    amax = largest(x) if m_splits is None else grouped_amax(x, m_splits)
    return amax, amax


def quantize_grouped_nvfp4(
    x: Tensor,
    m_splits: Tensor,
    *,
    with_rht: bool = False,
    key: Tensor | None = None,
    streams: tuple[int, int] = (0, 1),
    rowwise: bool = True,
    columnwise: bool = True,
) -> list[Tensor]:
    """Quantize each group of rows of x [T, C] with the group's amax: (packed, scales, amax) of each copy asked for.

    Rowwise: [T, ceil(C / 2)], [T, ceil(C / 16)], [G]; rows past the last group count as a group of amax 0. Columnwise,
    in rows padded to multiples of 16 (see `grouped`): [C, P / 2], [C, P / 16], [G].
    """
    if not (x.is_cuda or launch.as_accelerator) or definitions_only():
        return copies.quantize_grouped_nvfp4(
            x, m_splits, with_rht=with_rht, key=key, streams=streams, rowwise=rowwise, columnwise=columnwise
        )
    row_amax, col_amax = _amaxes(x, m_splits, with_rht and columnwise)
    wanted = (row_amax if rowwise else None, col_amax if columnwise else None)
    found = _copies(x, *wanted, m_splits, key, *streams, 1, with_rht)
    row = [*found[:2], row_amax] if rowwise else []
    col = [*found[-2:], col_amax] if columnwise else []
    return row + col


def quantize_grouped_four_over_six(
    x: Tensor,
    m_splits: Tensor,
    *,
    e4m3_max: int,
    err_mode: ErrorMode,
    rowwise: bool = True,
    columnwise: bool = True,
) -> list[Tensor]:
    """Do as `quantize_grouped_nvfp4`, with the candidates and the options of `quantize_four_over_six`."""
    quantize = partial(quantize_four_over_six, e4m3_max=e4m3_max, err_mode=err_mode)
    return copies.quantize_grouped_nvfp4(x, m_splits, rowwise=rowwise, columnwise=columnwise, quantize=quantize)


_PACKED = takes(
    "packed: uint8 [*B, R, P]; scales: float8_e4m3fn [*B, R, -(-columns // 16)]; amax: float32?; columns: value;"
    "P == -(-columns // 2); amax is None or amax.shape == B or amax.shape == (*B, R, 1)"
)


@operation(
    "dequantize_nvfp4",
    lambda packed, columns, dtype: like(packed, (*packed.shape[:-1], columns), dtype),
    reference=cpu.dequantize_nvfp4,
    takes=_PACKED,
)
def dequantize_nvfp4(packed: Tensor, scales: Tensor, amax: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Return [..., R, C] in `dtype`, C = columns; amax: of each matrix [...], or of each row [..., R, 1]; None leaves
    out the factor of the whole matrix."""
    from . import triton_decode

    return triton_decode.dequantize_nvfp4(packed, scales, amax, columns, dtype)


def decode_blocks(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Return value * scale in float32, exact, without the factor of the whole matrix: [..., R, C]."""
    if (packed.is_cuda or launch.as_accelerator) and not definitions_only():
        return dequantize_nvfp4(packed, scales, None, columns, torch.float32)
    return cpu.decode_blocks(packed, scales, columns)
