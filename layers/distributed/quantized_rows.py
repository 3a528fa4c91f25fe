"""Rows that travel between ranks as the quantized numbers that the receiving layer makes of them.

A format whose blocks lie within one row, with scales that are powers of two (MXFP8, FP8 in 1x128 blocks), gives a row
the same values wherever it is quantized, and again when it is quantized a second time: the second scale is the first
one, or, where the block's largest value was rounded down to a power of two, half of it, on whose finer grid the values
lie, too. So the sender rounds, codes and scales travel, and the receiver's layer gets values that its own quantizer
leaves as they are. What contracts rows, a weight gradient, sees the rounded values where it would have seen the
original ones.

R rows, C columns, B bytes of a row: C, plus the bytes of its scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..quantizer import Quantizer
from ..quantizer.encoding import OWN_SCALE, Uses
from ..quantizer.schema import field_layouts
from ..recipe.base import GemmQuantizers


class RowFormats(NamedTuple):
    """What rows, and the gradients of results, travel as; None: their own dtype."""

    rows: Quantizer | None = None
    gradients: Quantizer | None = None


def row_formats(first: GemmQuantizers | None, last: GemmQuantizers | None) -> RowFormats:
    """Return the formats in which the first layer that gets rows takes them, and the last one the gradients of its
    results. None: a layer without a recipe.

    Raises ValueError where a recipe quantizes them in a format that does not keep the values of single rows.
    """
    gradients = None if last is None or last.backward_override is not None else last.grad_output
    return RowFormats(_format("input", None if first is None else first.input), _format("grad_output", gradients))


def _format(role: str, quantizer: Quantizer | None) -> Quantizer | None:
    if quantizer is None or quantizer.KEEPS_VALUES:
        return None
    member = quantizer.member("rowwise")
    if not member.keeps_rows:
        raise ValueError(
            f"rows cannot travel quantized as the {role} of the experts, {member.FORMAT}, whose scales belong to more "
            "than one row or are no powers of two; allowed with expert_dispatch='all_to_all_quantized': MXFP8, and FP8 "
            "in 1x128 blocks with scales that are powers of two; for other recipes 'all_to_all'"
        )
    return member


def pack_rows(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Return x: [R, C], quantized, as bytes: uint8 [R, B], a row's codes and then its scales."""
    if not quantizer.keeps_rows:
        raise ValueError(f"rows do not keep their values in the format {quantizer.FORMAT}")
    uses = Uses(("rowwise",), traced=True)
    found = quantizer.encoded(x, OWN_SCALE, uses) or quantizer.encoded(x, OWN_SCALE, uses._replace(traced=False))
    assert found is not None, "only a graph is refused"
    return torch.cat([part.contiguous().view(torch.uint8) for part in found.fields.values()], dim=1)


def unpack_rows(packed: Tensor, quantizer: Quantizer, columns: int, dtype: torch.dtype) -> Tensor:
    """Return what `pack_rows` made bytes of: values [R, C] in `dtype`."""
    fields, at = {}, 0
    for layout in field_layouts(quantizer):
        if layout.usage == "rowwise" and layout.dtype is not None:
            size = layout.entries(0, columns, -1)[1] * layout.dtype.itemsize
            # contiguous memory of its own: a wider dtype has to begin at a multiple of its size
            own = packed[:, at : at + size].clone(memory_format=torch.contiguous_format)
            fields[layout.name] = own.view(layout.dtype)
            at += size
    return quantizer.operand_of_fields(fields, "rowwise", dtype, (packed.shape[0], columns)).values.to(dtype)
