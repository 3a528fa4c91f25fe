"""The tensors of quantized files seen as fields of our storage, or as plain values: read a region at a time.

A view has the dtype and shape of what it stands for and computes only what is asked of it, so that a conversion moves a
quantized checkpoint with the memory of a few regions. Where file and field are the same bytes there is no view.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from te_models.kernels.backend import has_library
from te_models.kernels.quantize import fp8_to_float
from te_models.kernels.quantize.cpu import fields as cpu_fields
from te_models.kernels.quantize.fp8.blocks import times_blocks
from te_models.layers.quantizer import IntQuantizer, Quantizer
from te_models.layers.quantizer.schema import field_layouts

from ..io.boxes import Box, Range, Shape, extents, slices
from ..io.dtypes import torch_dtype
from ..io.header import TensorInfo, byte_count
from ..io.store import FileStore
from ..mapping.tensor_map import TensorSpec
from . import integers, numbers
from .format import Part, WeightFormat

Block = tuple[int, int]


@dataclass(frozen=True)
class View:
    """A tensor that is computed from others: `read(box)` returns a region of it. same_bytes: it has the very bytes of
    the file's tensor of its name, seen in another dtype."""

    dtype: str
    shape: Shape
    read: Callable[[Box], Tensor]
    same_bytes: bool = False


class ViewStore:
    """A store of views, and of the tensors of files that are not hidden."""

    def __init__(self, files: FileStore, views: Mapping[str, View], hidden: Collection[str]) -> None:
        self._files, self._views = files, dict(views)
        self.tensors: dict[str, TensorInfo] = {n: info for n, info in files.tensors.items() if n not in hidden}
        for name, view in views.items():
            self.tensors[name] = TensorInfo(view.dtype, view.shape, 0, byte_count(view.dtype, view.shape))

    def read(self, name: str, box: Box) -> Tensor:
        if name not in self._views:
            return self._files.read(name, box)
        return self._views[name].read(box)

    def can_read_bytes(self, name: str) -> bool:
        view = self._views.get(name)
        return (view is None or view.same_bytes) and self._files.can_read_bytes(name)

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        self._files.read_into(name, begin, buffer)


def field_blocks(quantizer: Quantizer) -> dict[str, Block | None]:
    """Return which block of the matrix an entry of each field covers, by part: "data", "scale_inv", "amax"."""
    layouts = field_layouts(quantizer)
    return {layout.name.removeprefix("rowwise_"): layout.block for layout in layouts if layout.usage == "rowwise"}


def field_view(files: FileStore, weight: str, part: Part, quantizer: Quantizer, field: TensorSpec) -> View | None:
    """Return one part of a quantized weight as the field that it becomes; None where it is that field already."""
    name, (dtype,) = weight + part.suffix, field.dtypes
    if isinstance(quantizer, IntQuantizer) and part.meaning == "elements":
        return View(dtype, field.shape, lambda box: integers.read_bytes(files, name, box), same_bytes=True)
    if part.meaning == "zero" and files.tensors[name].dtype == "I32":
        return View(dtype, field.shape, lambda box: integers.read_zeros(files, name, part, box))
    convert = _conversion(files, name, part, dtype)
    block = field_blocks(quantizer)[part.field]
    info = files.tensors[name]
    if convert is None and (info.dtype, info.shape) == (dtype, field.shape) and block == part.block:
        return None

    def read(box: Box) -> Tensor:
        if block != part.block and part.meaning == "elements":
            return unpacked_region(files, name, part, box, torch_dtype(dtype))
        found = region(files, name, part, box, block, convert or (lambda found: found.to(torch_dtype(dtype))))
        return found.expand(extents(box))  # the number of a matrix, where the field has one per block

    return View(dtype, field.shape, read)


def _conversion(files: FileStore, name: str, part: Part, dtype: str) -> Callable[[Tensor], Tensor] | None:
    """Return what turns the file's numbers into the field's; None: they are the same numbers."""
    if part.meaning == "factor":
        return numbers.amax_of_factor
    if part.meaning == "divisor":
        return numbers.amax_of_divisor
    if part.meaning != "elements" and dtype == "U8" and files.tensors[name].dtype == "F8_E8M0":
        return lambda scales: scales.view(torch.uint8)
    if part.meaning != "elements" and dtype == "F32" and files.tensors[name].dtype == "F8_E8M0":
        return numbers.scale_to_float
    if part.meaning != "elements" and dtype == "U8" and files.tensors[name].dtype != "U8":
        return lambda scales: numbers.power_of_two_to_e8m0(scales.float())
    return None


def value_view(files: FileStore, weight: str, weight_format: WeightFormat, shape: Shape, dtype: str) -> View:
    """Return the values [..., out, in] that a quantized weight stands for: float32 products, rounded to `dtype`."""

    data = weight_format.data

    def scales(part: Part, box: Box, block: Block) -> Tensor:
        return region(files, weight + part.suffix, part, box, block, numbers.scale_to_float)

    def read(box: Box) -> Tensor:
        if weight_format.element == "values":
            return files.read(weight + data.suffix, box).to(torch_dtype(dtype))
        if weight_format.integers:
            return integers.integer_values(files, weight, weight_format, shape, box, torch_dtype(dtype), scales)
        if weight_format.element == "e2m1":
            values = unpacked_region(files, weight + data.suffix, data, box, torch.float32)
        else:
            found = _decoded_in_one_pass(files, weight, weight_format, box, torch_dtype(dtype))
            if found is not None:
                return found
            values = region(files, weight + data.suffix, data, box, (1, 1), fp8_to_float)
        for part in weight_format.scales:
            values = _scaled(files, weight, part, box, values)
        return values.to(torch_dtype(dtype))

    return View(dtype, shape, read)


def _decoded_in_one_pass(
    files: FileStore, weight: str, weight_format: WeightFormat, box: Box, dtype: torch.dtype
) -> Tensor | None:
    """Return the values of a region of E4M3 with a scale per block, where a compiled function computes them; else
    None."""
    if weight_format.element != "e4m3" or len(weight_format.scales) != 1:
        return None
    (scale,), data, columns = weight_format.scales, weight_format.data, box[-1]
    if scale.block is None or scale.meaning == "divisor" or columns.step != 1 or columns.start % scale.block[1]:
        return None
    if not (math.prod(extents(box)) and has_library(cpu_fields.FIELDS, dtype)):
        return None
    found = region(files, weight + data.suffix, data, box, (1, 1), torch.Tensor.contiguous)
    width = scale.block[1]
    entries = (*box[:-1], Range(columns.start // width, -(-columns.stop // width)))
    factors = region(files, weight + scale.suffix, scale, entries, (1, width), numbers.scale_to_float)
    return cpu_fields.decode_e4m3(found.flatten(0, -2), factors.flatten(0, -2).contiguous(), width, dtype).view(
        found.shape
    )


def _scaled(files: FileStore, weight: str, part: Part, box: Box, values: Tensor) -> Tensor:
    """Return the values of a region times their scales, or divided by their divisor."""
    columns, width = box[-1], 1
    if part.block is not None and columns.step == 1 and columns.start % part.block[1] == 0:
        width = part.block[1]  # an entry is looked up once for all of its columns
        box = (*box[:-1], Range(columns.start // width, -(-columns.stop // width)))
    scale = region(files, weight + part.suffix, part, box, (1, width), numbers.scale_to_float)
    if part.meaning == "divisor":
        return values / scale
    if width == 1 or scale.shape[-1] == 1:
        return values * scale
    if values.shape[-1] % width == 0 and values.is_contiguous():  # they are nobody else's
        values.unflatten(-1, (-1, width)).mul_(scale[..., None])
        return values
    return times_blocks(values, scale, (1, width))


def unpacked_region(files: FileStore, name: str, part: Part, box: Box, dtype: torch.dtype) -> Tensor:
    """Return a region of packed elements as values in `dtype`."""
    columns = box[-1]
    assert columns.step == 1, "no weight map interleaves columns of a quantized weight"
    first, last = columns.start // 2, -(-columns.stop // 2)
    if part.grouped is None:
        whole = files.read(name, (*box[:-1], Range(first, last)))
    else:
        group = part.grouped
        groups = files.read(name, (*box[:-1], Range(first // group, -(-last // group)), Range(0, group)))
        whole = groups.flatten(-2)[..., first % group :][..., : last - first]
    return numbers.unpack_e2m1(whole, dtype)[..., columns.start % 2 :][..., : columns.size]


def region(
    files: FileStore, name: str, part: Part, box: Box, block: Block | None, convert: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a file's entries, converted, for a region whose own entries cover `block` of the matrix (None: one each).

    A coarser entry is repeated; one entry per matrix gets two dimensions of size 1 where the region has some.
    """
    if part.block is None:
        stored = files.view(name)
        lead = box if block is None else box[:-2]
        found = convert(stored.reshape(stored.shape[: len(lead)])[slices(lead)])
        return found if block is None else found[..., None, None]
    assert block is not None, "a field with one entry per matrix comes from a part that has one"
    if block == part.block:
        return convert(_entries(files, name, part, box))
    rows, columns = (
        torch.arange(*r, device="cpu") * size // theirs for r, size, theirs in zip(box[-2:], block, part.block)
    )
    around = (Range(int(indices[0]), int(indices[-1]) + 1) for indices in (rows, columns))
    found = convert(_entries(files, name, part, (*box[:-2], *around)))
    # a row or column that repeats is looked up; eight-bit floats could not be
    found = found if len(rows) == found.shape[-2] else found.index_select(-2, rows - rows[0])
    return found if len(columns) == found.shape[-1] else found.index_select(-1, columns - columns[0])


def _entries(files: FileStore, name: str, part: Part, box: Box) -> Tensor:
    """Return a region of the matrix of entries of a part that has one per block, however they lie in the file."""
    *lead, rows, columns = box
    if part.entries == "apart":
        return files.read(name, (*lead, rows, Range(0, 1), columns, Range(0, 1))).squeeze(-1).squeeze(-2)
    if part.entries == "column":
        return files.read(name, (*lead, rows))[..., None][..., slices((columns,))[0]]
    if part.grouped is None:
        return files.read(name, box)
    group = part.grouped
    found = files.read(name, (*lead, rows, Range(columns.start // group, -(-columns.stop // group)), Range(0, group)))
    first = columns.start % group
    return found.flatten(-2)[..., first : first + columns.stop - columns.start : columns.step]
