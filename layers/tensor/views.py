"""Views of quantized tensors: what shares the stored fields, and a clear error for what cannot.

A view of another shape keeps the matrix it looks at (`matrix_shape`), so `view(-1)` is a tensor of numbers, not of raw
bytes. Slices and splits may cut between blocks only. A transpose exchanges the rowwise and the columnwise copy, whose
numbers it does not touch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import infer_size

from ..quantizer.schema import cut_multiple, field_layouts
from .formats import TENSOR_CLASSES
from .fsdp import block_rows
from .quantized_tensor import QuantizedTensor


def alias(x: QuantizedTensor) -> QuantizedTensor:
    """Return another wrapper around the same fields."""
    return x.map_fields(lambda field: field).keep_attributes(x)


def view(x: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Return x in another shape of as many elements."""
    shape = torch.Size(infer_size(tuple(size), x.numel()))
    if shape == x.shape:
        return alias(x)
    if x.matrix_shape.numel() != x.numel():
        raise ValueError(f"a {type(x).__name__} with padded rows cannot be viewed as {tuple(shape)}; dequantize it")
    return x.wrap(x.fields, shape=shape, matrix_shape=x.matrix_shape).keep_attributes(x)


def as_strided(
    x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """Return x itself where the strides describe x; anything else looks at bytes and is refused."""
    if tuple(size) == tuple(x.shape) and tuple(stride) == x.stride() and not storage_offset:
        return alias(x)
    raise refused("as_strided", x)


def expand(x: QuantizedTensor, size: Sequence[int], *, implicit: bool = False) -> QuantizedTensor:
    """Return x where nothing is repeated."""
    if all(n in (-1, m) for n, m in zip(reversed(size), reversed(x.shape), strict=False)) and len(size) == x.dim():
        return alias(x)
    raise refused("expand", x)


def transpose(x: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    """Return x with its last two dimensions exchanged: the rowwise copy becomes the columnwise one."""
    dims = {dim0 % x.dim(), dim1 % x.dim()}
    if len(dims) == 1:
        return alias(x)
    x.require_cuttable("be transposed")
    if dims != {x.dim() - 2, x.dim() - 1}:
        raise ValueError(f"only the last two dimensions of a {type(x).__name__} can be exchanged; got {dim0}, {dim1}")
    quantizer = x.quantizer.of_transpose()
    if quantizer is None:
        raise refused("transpose", x)
    layouts = {layout.name: layout for layout in field_layouts(quantizer)}
    fields = {}
    for layout in x.layouts:
        usage, part = layout.name.split("_", 1)
        name = layout.name if x.quantizer.symmetric else f"{_OTHER[usage]}_{part}"
        # relative to the transposed matrix, a field that was not stored transposed is
        as_stored = layout.block is None or layout.transposed != layouts[name].transposed
        fields[name] = getattr(x, layout.name) if as_stored else getattr(x, layout.name).mT
    return x.view_of(fields, quantizer=quantizer, shape=torch.Size((*x.shape[:-2], x.shape[-1], x.shape[-2])))


_OTHER = {"rowwise": "columnwise", "columnwise": "rowwise"}


def transpose_dims(x: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    """Return a transpose; other orders are refused."""
    order = [d % x.dim() for d in dims]
    moved = [i for i, d in enumerate(order) if i != d]
    return transpose(x, *moved) if len(moved) == 2 else (alias(x) if not moved else _refuse_permute(x, dims))


def _refuse_permute(x: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    raise ValueError(f"only the last two dimensions of a {type(x).__name__} can be exchanged; got the order {dims}")


def narrow(x: QuantizedTensor, dim: int, start: int, stop: int) -> QuantizedTensor:
    """Return entries start..stop along `dim`, sharing the fields. ValueError where that would cut a block."""
    dim, size = dim % x.dim(), x.shape[dim]
    if (start, stop) == (0, size):
        return alias(x)
    x.require_cuttable("be sliced")
    shape = torch.Size((*x.shape[:dim], stop - start, *x.shape[dim + 1 :]))
    if dim < x.dim() - 2:  # a batch dimension; every field has it
        return x.view_of({n: f.narrow(dim, start, stop - start) for n, f in x.fields.items()}, shape=shape)
    matrix_dim = dim - x.dim()  # -2 or -1
    align = cut_multiple(x.quantizer, matrix_dim)
    for cut in (start, stop):
        if cut % align and cut != size and not (cut == stop and x.unequal_shards):  # a shard ends with the whole
            name = "rows" if matrix_dim == -2 else "columns"
            raise ValueError(
                f"cannot cut a {type(x).__name__} of shape {tuple(x.shape)} between {name} {cut - 1} and {cut}: its "
                f"blocks span {align} {name}, so allowed are multiples of {align}"
            )
    fields, shared = {}, False
    for layout in x.layouts:
        field = getattr(x, layout.name)
        if layout.block is None:
            fields[layout.name], shared = field, True
        else:
            fields[layout.name] = field.narrow(layout.axis(matrix_dim), *layout.entries(start, stop, matrix_dim))
    new = x.view_of(fields, shape=shape)
    new.shares_scale |= shared and not x.unequal_shards  # a shard gets a separate scale, or its group
    return new


def slice_(
    x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    """Return x[start:end] along `dim`."""
    if step != 1:
        raise refused(f"slice with step {step}", x)
    start, stop, _ = slice(start, end).indices(x.shape[dim])
    return narrow(x, dim, start, max(start, stop))


def select(x: QuantizedTensor, dim: int, index: int) -> Any:
    """Return member `index` of a stack, sharing the fields; a row of a matrix is refused."""
    dim = dim % x.dim()
    x.require_cuttable("be indexed")
    if dim >= x.dim() - 2:
        raise refused("select", x)
    fields = {name: field.select(dim, index) for name, field in x.fields.items()}
    shape = torch.Size((*x.shape[:dim], *x.shape[dim + 1 :]))
    return x.view_of(fields, shape=shape, cls=TENSOR_CLASSES.get(x.quantizer.FORMAT, QuantizedTensor))


def unbind(x: QuantizedTensor, dim: int = 0) -> list[Any]:
    """Return all members of a stack."""
    return [select(x, dim, i) for i in range(x.shape[dim])]


def split_dim(x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    """Return pieces of `size` entries, the last one perhaps smaller; where `fully_shard` cuts, of whole blocks."""
    length = x.shape[dim]
    if x.unequal_shards and dim % x.dim() == 0:
        block = block_rows(x)
        size = -(-size // block) * block
    return [narrow(x, dim, i, min(i + size, length)) for i in range(0, length, size)]


def split_with_sizes(x: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    """Return pieces of the given sizes."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(narrow(x, dim, start, start + size))
        start += size
    return pieces


def refused(what: str, x: Tensor) -> ValueError:
    """Return the error for a view that cannot share the storage of a quantized tensor."""
    return ValueError(
        f"{what} is a view, and a {type(x).__name__} of shape {tuple(x.shape)} has no such view that shares its "
        "storage; call dequantize() first for its values"
    )
