"""Whether a format takes the numbers of a folder, where headers cannot say: they are read before anything is written.

Scales of small blocks are written as scales of larger blocks where they are the same throughout each of these: MXFP8 in
32x32 blocks whose scales come from 128x128 blocks is written as such blocks again, and 128x128 blocks that share one
scale as a matrix with one. And what is held in eight bits is written in four where all values are such.
"""

from collections.abc import Collection, Mapping

import torch

from te_models.layers.quantizer import Quantizer

from ..formats import WeightFormat, numbers
from ..formats.format import Part
from ..formats.namespace import FieldNamespace
from ..formats.views import Block, field_blocks
from ..io.boxes import Shape
from ..io.store import Store
from ..mapping.plan import ConversionPlan, OutputTensor
from ..mapping.quantized_format import SUFFIXES
from ..mapping.stream import read_bands

_BAND = 1 << 20


def coarser(part: Part, block: Block | None, field: Shape) -> tuple[int, int]:
    """Return how many rows and columns of a field's entries [..., R, C] one entry of the part stands for."""
    if part.meaning != "scale" or block is None:
        return 1, 1
    if part.block is None:
        return field[-2], field[-1]
    rows, columns = (max(1, theirs // ours) for theirs, ours in zip(part.block, block))
    return rows, columns


def unrepresentable(
    store: Store,
    plan: ConversionPlan,
    found: FieldNamespace,
    formats: Mapping[str, WeightFormat],
    quantizers: Mapping[str, Quantizer],
    stacks: Collection[str],
    *,
    narrow: bool,
) -> dict[str, str]:
    """Return parameter -> why its format cannot have its numbers, of the first kind of reasons that there are.

    store, plan: which have the numbers. formats: stored weight -> its format. stacks: weights whose experts share one
    number per matrix. narrow: also look for values that four bits do not hold; where they are not looked for, writing
    them fails.
    """
    return (
        _uneven(store, plan, found, formats, quantizers)
        or _unequal(store, plan, found, formats, stacks)
        or (_too_wide(store, plan, found, formats) if narrow else {})
    )


def _uneven(
    store: Store,
    plan: ConversionPlan,
    found: FieldNamespace,
    formats: Mapping[str, WeightFormat],
    quantizers: Mapping[str, Quantizer],
) -> dict[str, str]:
    """Return parameter -> why its scales do not fit the format's larger blocks; this reads such scales."""
    owners, uneven = found.owners, dict[str, str]()
    scales = {weight + form.part("scale_inv").suffix: form for weight, form in formats.items()}
    for output in plan.outputs:
        name = owners.get(output.name, "").removesuffix(SUFFIXES["rowwise_scale_inv"])
        form = scales.get(output.name)
        if form is None or name not in found.formats or form.takes(quantizers[name]):
            continue
        part = form.part("scale_inv")
        rows, columns = coarser(part, field_blocks(quantizers[name])[part.field], output.shape)
        if name not in uneven and not _even(store, output, rows, columns):
            where = "one matrix" if part.block is None else f"blocks of {part.block[0]}x{part.block[1]}"
            uneven[name] = f"its scales differ inside of {where}"
    return uneven


def _unequal(
    store: Store,
    plan: ConversionPlan,
    found: FieldNamespace,
    formats: Mapping[str, WeightFormat],
    stacks: Collection[str],
) -> dict[str, str]:
    """Return parameter -> why its experts cannot have one number; this reads such numbers."""
    numbers = {
        weight + part.suffix: (part, formats[weight].name)
        for weight in stacks
        for part in formats[weight].scales
        if part.block is None
    }
    owners, unequal = found.owners, dict[str, str]()
    for output in plan.outputs:
        if output.name not in numbers or output.name not in found.fields:
            continue
        part, name = numbers[output.name]
        values = torch.cat([band.flatten() for _, band in read_bands(store, output, _BAND)])
        if not (values == values[0]).all():
            parameter = owners[output.name].removesuffix(SUFFIXES[f"rowwise_{part.field}"])
            unequal[parameter] = f"its experts have scales of their own, where {name} has one for all"
    return unequal


def _too_wide(
    store: Store, plan: ConversionPlan, found: FieldNamespace, formats: Mapping[str, WeightFormat]
) -> dict[str, str]:
    """Return parameter -> why its elements do not fit a format of four bits; this reads them."""
    owners, wide = found.owners, dict[str, str]()
    narrow = {weight + form.data.suffix for weight, form in formats.items() if form.element == "e2m1"}
    for output in plan.outputs:
        name = owners.get(output.name)
        if output.name not in narrow or name not in found.formats or name in wide or output.dtype != "F8_E4M3":
            continue
        if not all(numbers.fits_e2m1(band) for _, band in read_bands(store, output, _BAND)):
            wide[name] = "it has values that four bits do not hold"
    return wide


def _even(store: Store, scales: OutputTensor, rows: int, columns: int) -> bool:
    """Whether all scales [..., R, C] of each group of `rows` x `columns` are the same."""
    for _, band in read_bands(store, scales, _BAND, multiple=rows):
        coarse = band[..., ::rows, ::columns]
        coarse = coarse.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        if not torch.equal(coarse[..., : band.shape[-2], : band.shape[-1]], band):
            return False
    return True
