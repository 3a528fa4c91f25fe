"""Whether a format takes the numbers of a folder, where headers cannot say: they are read before anything is written.

Scales of small blocks are written as those of larger ones where they are the same throughout each of these: MXFP8 in
32x32 blocks whose scales come from 128x128 blocks is written as such blocks again. And what is held in eight bits is
written in four where all values are such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from te_models.layers.quantizer import Quantizer

from .dtypes import torch_dtype
from .formats import WeightFormat, numbers
from .formats.format import Part
from .formats.namespace import FieldNamespace
from .formats.views import Block, field_blocks
from .move import cut_pieces, fill_tensor
from .plan import Output, Plan
from .quantized_format import SUFFIXES
from .store import Store

_BAND = 1 << 20


def coarser(part: Part, block: Block | None) -> tuple[int, int]:
    """Return how many rows and columns of a field's entries one entry of the part stands for."""
    if part.meaning != "scale" or part.block is None or block is None:
        return 1, 1
    rows, columns = (max(1, theirs // ours) for theirs, ours in zip(part.block, block))
    return rows, columns


def uneven_parameters(
    store: Store,
    plan: Plan,
    found: FieldNamespace,
    weight_format: WeightFormat,
    quantizers: Mapping[str, Quantizer],
) -> dict[str, str]:
    """Return parameter -> why its scales cannot be those of the format's larger blocks; this reads such scales."""
    part = weight_format.part("scale_inv")
    owners = {link.stored: link.name for link in found.namespace.links if link.stored in found.fields}
    uneven: dict[str, str] = {}
    for output in plan.outputs:
        name = owners.get(output.name, "").removesuffix(SUFFIXES["rowwise_scale_inv"])
        if not output.name.endswith(part.suffix) or name not in found.formats or weight_format.takes(quantizers[name]):
            continue
        rows, columns = coarser(part, field_blocks(quantizers[name])[part.field])
        if name not in uneven and not _even(store, output, rows, columns):
            block = part.block
            assert block is not None, "scales of blocks"
            uneven[name] = f"its scales differ inside of blocks of {block[0]}x{block[1]}"
    return uneven


def too_wide_parameters(store: Store, plan: Plan, found: FieldNamespace, weight_format: WeightFormat) -> dict[str, str]:
    """Return parameter -> why its elements cannot be those of a format of four bits; this reads them."""
    if weight_format.element != "e2m1":
        return {}
    owners = {link.stored: link.name for link in found.namespace.links if link.stored in found.fields}
    wide: dict[str, str] = {}
    for output in plan.outputs:
        name = owners.get(output.name)
        if name not in found.formats or name in wide or output.dtype != "F8_E4M3":
            continue
        rows = max(1, _BAND // max(1, math.prod(output.shape[1:])))
        bands = (range(begin, min(output.shape[0], begin + rows)) for begin in range(0, output.shape[0], rows))
        if not all(numbers.fits_e2m1(read_rows(store, output, band.start, band.stop)) for band in bands):
            wide[name] = "it has values that four bits do not hold"
    return wide


def read_rows(store: Store, field: Output, begin: int, end: int) -> torch.Tensor:
    """Return indices begin .. end - 1 along the first dimension of a field that a plan moves; all of a scalar."""
    shape = (end - begin, *field.shape[1:]) if field.shape else ()
    band = torch.empty(shape, dtype=torch_dtype(field.dtype))
    fill_tensor(store, list(cut_pieces(field.pieces, 0, begin, end)) if field.shape else field.pieces, band)
    return band


def _even(store: Store, scales: Output, rows: int, columns: int) -> bool:
    """Whether all scales [..., R, C] of each group of `rows` x `columns` are the same."""
    for begin in range(0, scales.shape[0], rows):
        band = read_rows(store, scales, begin, min(scales.shape[0], begin + rows))
        kept = band[..., ::rows, ::columns]
        kept = kept.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        if not torch.equal(kept[..., : band.shape[-2], : band.shape[-1]], band):
            return False
    return True
