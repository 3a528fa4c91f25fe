"""Integers of four and eight bits with a scale per group of a row, as compressed-tensors packs them into words.

    X.weight_packed I32 [M, K/8] (four bits), [M, K/4] (eight)      X.weight_scale BF16, F16 or F32 [M, K/group]
    X.weight_zero_point I32 [M/8, K/group], [M/4, K/group]          X.weight_shape I64 or I32 [2]: M and K

value = (code - zero) * scale. Codes are unsigned; without zero points the zero is 2^(bits - 1). The first of a word's
codes is in its lowest bits: of a row's columns, and of zero points, of a column's rows. Our fields hold the bytes of
the former as they are, and the latter one in a byte. `X.weight_g_idx` gives the group of each column where these are
not runs of columns; our fields do not hold it.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.quantize.integers.reference import dequantize_integers, unpack_nibbles
from te_models.layers.quantizer import Int4Quantizer, Int8Quantizer, IntQuantizer, Quantizer

from ..io.boxes import Box, Range, Shape
from ..io.store import FileStore
from .format import FLOAT_SCALES, WHOLE, Beside, Part, WeightFormat

WORD = 4
"""Bytes of the words that codes are packed into."""
OUT_OF_ORDER = "its groups are not runs of columns (g_idx)"
_QUANTIZERS: dict[int, type[IntQuantizer]] = {4: Int4Quantizer, 8: Int8Quantizer}


@functools.cache
def packed_format(
    name: str, bits: int, group: int, *, zero_points: bool, attention: tuple[str, ...] = (), shape: bool = True
) -> WeightFormat:
    """Return the format of packed integers. group: columns that share a scale, 0 for all; shape: whether files have
    `weight_shape`."""
    per_word, columns = 8 * WORD // bits, group or WHOLE
    parts = [
        Part("data", "_packed", ("I32",), "elements", (1, per_word)),
        Part("scale_inv", "_scale", FLOAT_SCALES, "scale", (1, columns)),
    ]
    if zero_points:
        parts.append(Part("zero_point", "_zero_point", ("I32",), "zero", (per_word, columns)))
    form = _QUANTIZERS[bits](group_size=group, zero_points=zero_points)
    order = Beside("_g_idx", ("I32", "I64"), False, lambda of: groups_in_order(of, group), OUT_OF_ORDER)
    sizes = Beside("_shape", ("I64", "I32"), True, lambda of: torch.tensor(of[-2:], device="cpu"))
    return WeightFormat(
        name=name,
        element="int4" if bits == 4 else "int8",
        parts=tuple(parts),
        storages={form.FORMAT: form},
        takes=functools.partial(_takes, form),
        attention=attention,
        columns=per_word,
        beside=(sizes, order) if shape else (order,),
    )


def _takes(form: IntQuantizer, quantizer: Quantizer) -> bool:
    if not isinstance(quantizer, type(form)):
        return False
    return (quantizer.group_size, quantizer.zero_points) == (form.group_size, form.zero_points)


def groups_in_order(shape: Shape, group: int) -> Tensor:
    """Return the group of each column of a weight whose groups are runs of columns."""
    return torch.arange(shape[-1], device="cpu") // (group or max(1, shape[-1]))


def read_bytes(files: FileStore, name: str, box: Box) -> Tensor:
    """Return a region of words as bytes [..., M, 4 * words]: the very bytes, in the order of their codes."""
    columns = box[-1]
    first, last = columns.start // WORD, -(-columns.stop // WORD)
    words = files.read(name, (*box[:-1], Range(first, last))).contiguous()
    begin = WORD * first
    return words.view(torch.uint8)[..., columns.start - begin : columns.stop - begin : columns.step]


def to_words(data: Tensor) -> Tensor:
    """Undo `read_bytes` for whole rows."""
    return data.contiguous().view(torch.int32)


def read_zeros(files: FileStore, name: str, part: Part, box: Box) -> Tensor:
    """Return zero points [..., M, groups] as bytes."""
    assert part.block is not None, "zero points have blocks"
    if files.tensors[name].dtype == "U8":
        return files.read(name, box)
    *lead, rows, columns = box
    per_word = part.block[0]
    bits, first, last = 8 * WORD // per_word, rows.start // per_word, -(-rows.stop // per_word)
    words = files.read(name, (*lead, Range(first, last), columns))
    shifts = torch.arange(0, 8 * WORD, bits, dtype=torch.int32, device="cpu")[:, None]
    codes = (words[..., None, :] >> shifts) & (2**bits - 1)
    begin = first * per_word
    return codes.flatten(-3, -2)[..., rows.start - begin : rows.stop - begin : rows.step, :].to(torch.uint8)


def zeros_to_words(zeros: Tensor, per_word: int) -> Tensor:
    """Undo `read_zeros`, for rows from the first of a word on; what is past the last row is zero."""
    bits = 8 * WORD // per_word
    wide = F.pad(zeros.long(), (0, 0, 0, -zeros.shape[-2] % per_word)).unflatten(-2, (-1, per_word))
    shifts = torch.arange(0, 8 * WORD, bits, device="cpu")[:, None]
    return (wide << shifts).sum(-2).to(torch.int32)


def integer_values(
    files: FileStore,
    weight: str,
    weight_format: WeightFormat,
    shape: Shape,
    box: Box,
    dtype: torch.dtype,
    scales: Callable[[Part, Box, tuple[int, int]], Tensor],
) -> Tensor:
    """Return a region of the values of a weight. scales: reads float32 scales of a region with blocks of a size."""
    data, scale, *zero = weight_format.parts
    assert data.block is not None, "elements have blocks"
    *lead, rows, columns = box
    bits, whole = 8 * WORD // data.block[1], shape[-1]
    group = weight_format.parts[1].block[1] if weight_format.parts[1].block else whole
    order = f"{weight}_g_idx" if f"{weight}_g_idx" in files.tensors else None
    group = min(group, whole)
    first, last = columns.start // group, -(-columns.stop // group)
    begin, end = first * group, min(whole, last * group)
    entries = Range(0, -(-whole // group)) if order else Range(first, last)
    per_byte = 8 // bits
    codes = read_bytes(files, weight + data.suffix, (*lead, rows, Range(begin // per_byte, -(-end // per_byte))))
    codes = unpack_nibbles(codes, end - begin) if bits == 4 else codes
    factors = scales(scale, (*lead, rows, entries), (1, scale.block[1] if scale.block else whole))
    zeros = read_zeros(files, weight + zero[0].suffix, zero[0], (*lead, rows, entries)) if zero else None
    if order is not None:
        groups = files.view(order).long()[begin:end]
        factors, zeros = factors.index_select(-1, groups), None if zeros is None else zeros.index_select(-1, groups)
        values = dequantize_integers(codes, factors, zeros, bits, 1, dtype)
    else:
        values = dequantize_integers(codes, factors, zeros, bits, group, dtype)
    return values[..., columns.start - begin : columns.stop - begin : columns.step]
