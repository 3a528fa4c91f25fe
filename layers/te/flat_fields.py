"""The flat buffers of Transformer Engine's grouped storages as the fields that are stored here.

There every buffer is one-dimensional, one member after the other, and the scales of a member's blocks are padded: to
multiples of (128, 4) of MXFP8's and NVFP4's rowwise copies, (4, 128) of MXFP8's columnwise one, and to 4 along the
last dimension of 128-wide blocks, whose 1-D scales lie transposed. Fields that are padded or transposed there are
copied, all others are views of the buffers. `GroupedTensorStorage(shape, dtype, num_tensors=..., quantizer=...,
data=..., scale_inv=...)` takes them from here on.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from te_models.suggestions import shown

from ..quantizer import Fields, IdentityQuantizer, Quantizer
from ..quantizer.schema import empty_fields
from ..tensor.grouped_storage import GroupedTensorStorage
from ..tensor.grouped_tensor import GroupedRows, GroupedTensor
from .arguments import add_members, require_default

BUFFERS = {
    "rowwise_data": "data",
    "rowwise_scale_inv": "scale_inv",
    "rowwise_amax": "amax",
    "columnwise_data": "columnwise_data",
    "columnwise_scale_inv": "columnwise_scale_inv",
    "columnwise_amax": "columnwise_amax",
}
"""A field's name -> its buffer's."""


class Grouped(NamedTuple):
    """What `GroupedTensorStorage` is made of."""

    fields: Fields
    quantizer: Quantizer
    shape: torch.Size
    dtype: torch.dtype
    m_splits: Tensor | None
    amaxes: dict[str, Tensor]


def from_flat(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    num_tensors: int,
    shapes: Sequence[Sequence[int]] | None = None,
    quantizer: Quantizer | None = None,
    scale: Tensor | None = None,
    first_dims: Tensor | None = None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
    offsets: Sequence[int] | None = None,
    scale_inv_offsets: Sequence[int] | None = None,
    columnwise_scale_inv_offsets: Sequence[int] | None = None,
    requires_grad: bool = False,
    stride: Sequence[int] | None = None,
    with_gemm_swizzled_scales: bool = False,
    row_scaled_nvfp4: bool = False,
    nvfp4_use_4over6: bool = False,
    nvfp4_e4m3_max: int = 448,
    **buffers: Tensor | None,
) -> Grouped:
    """Return what Transformer Engine's arguments describe. shape: [num_tensors rows, columns], or [rows of all,
    columns] with first_dims [num_tensors]; quantizer None: high precision; buffers: by the names in BUFFERS. Offsets
    are derived, and compared where they lie on the host; scale, requires_grad and stride say nothing here. ValueError
    for what does not fit together, and for what is not stored here: members of other columns, swizzled scales, and with
    first_dims columnwise copies, 128-wide blocks and padded scales."""
    if not isinstance(num_tensors, int) or num_tensors < 1 or len(shape) != 2:
        raise ValueError(
            f"shape is {shown(tuple(shape))} with num_tensors={shown(num_tensors)}; allowed: two sizes, and 1 or more"
        )
    if last_dims is not None:
        raise ValueError("last_dims are given; allowed: None, or te_models.layers.MixedShapesStorage for such members")
    require_default("with_gemm_swizzled_scales", with_gemm_swizzled_scales, False)
    unknown = buffers.keys() - set(BUFFERS.values())
    if unknown:
        raise TypeError(f"GroupedTensorStorage has no argument {min(unknown)!r}")
    quantizer = cast("Quantizer", IdentityQuantizer() if quantizer is None else cast("Any", quantizer).copy())
    for name, value in (
        ("row_scaled_nvfp4", row_scaled_nvfp4),
        ("nvfp4_use_4over6", nvfp4_use_4over6),
        ("nvfp4_e4m3_max", nvfp4_e4m3_max if nvfp4_use_4over6 else 448),
    ):
        own = getattr(quantizer, name, 448 if name == "nvfp4_e4m3_max" else False)
        if value != own:
            raise ValueError(f"{name} is {shown(value)} and the quantizer's {own}; allowed: the same")
    found = {name: buffers[b] for name, b in BUFFERS.items() if buffers.get(b) is not None}
    if "rowwise_data" not in found and "columnwise_data" not in found:
        raise ValueError("data and columnwise_data are None; allowed: a buffer for at least one of the two")
    quantizer = quantizer.with_usage(rowwise="rowwise_data" in found, columnwise="columnwise_data" in found)
    rows, columns = shape
    if first_dims is None:
        if rows % num_tensors:
            raise ValueError(f"shape is {tuple(shape)}; allowed: a multiple of num_tensors, {num_tensors}, rows")
        logical = torch.Size((num_tensors, rows // num_tensors, columns))
        _check_shapes(shapes, offsets, [tuple(logical[1:])] * num_tensors)
    else:
        if first_dims.shape != (num_tensors,) or first_dims.is_floating_point():
            raise ValueError(f"first_dims is {shown(first_dims)}; allowed: integers of shape ({num_tensors},)")
        if not quantizer.rowwise or quantizer.columnwise or quantizer.FORMAT == "float8_block":
            raise ValueError(
                "first_dims are given; allowed with them: data without columnwise_data, not in 128-wide blocks"
            )
        logical = torch.Size((rows, columns))
    specs = empty_fields(quantizer, logical, "meta", dtype)
    if first_dims is not None:
        specs = {n: s if s.dim() else s.expand(num_tensors) for n, s in specs.items()}
    fields = {name: _field(name, spec, found, quantizer, first_dims is not None) for name, spec in specs.items()}
    amaxes: Any = {
        u: found[f"{u}_amax"] for u in ("rowwise", "columnwise") if f"{u}_amax" in found and f"{u}_amax" not in fields
    }
    return Grouped(fields, quantizer, logical, dtype, first_dims, amaxes)


def _check_shapes(shapes: Any, offsets: Any, expected: list[tuple[int, ...]]) -> None:
    if shapes is not None and [tuple(s) for s in shapes] != expected:
        raise ValueError(f"shapes is {shown([tuple(s) for s in shapes])}; allowed: {len(expected)} times {expected[0]}")
    starts = [0, *accumulate(math.prod(s) for s in expected)]
    if offsets is not None and list(offsets)[: len(expected)] != starts[:-1]:
        raise ValueError(f"offsets is {shown(list(offsets))}; allowed: {starts}, one member after the other")


def _field(name: str, spec: Tensor, found: dict[str, Any], quantizer: Quantizer, by_rows: bool) -> Tensor:
    """Return one field as `spec`, of the meta device, describes it."""
    usage, _, part = name.partition("_")
    transposed = False
    if quantizer.FORMAT == "float8" and part == "data" and "rowwise_data" not in found:
        name, transposed = "columnwise_data", True  # the one copy, there the transpose
    elif name not in found and quantizer.FORMAT == "float8" and f"columnwise_{part}" in found:
        name = f"columnwise_{part}"
    if name not in found:
        raise ValueError(f"{BUFFERS[name]} is None; allowed: a buffer, which a {quantizer.FORMAT} copy needs")
    buffer = found[name].detach().reshape(-1)
    if buffer.dtype != spec.dtype:
        if buffer.element_size() != spec.element_size() or buffer.dtype != torch.uint8:
            raise ValueError(f"{BUFFERS[name]} has {buffer.dtype}; allowed: {spec.dtype} or its bytes")
        buffer = buffer.view(spec.dtype)
    own = tuple(spec.shape)
    if part == "scale_inv" and not by_rows and len(own) == 3:
        stored, transposed = _padded(quantizer, usage, own)
    else:
        stored = (own[0], own[2], own[1]) if transposed else own
    if buffer.numel() == spec.numel() and not transposed:
        return buffer.view(own)
    if buffer.numel() != math.prod(stored):
        raise ValueError(f"{BUFFERS[name]} has {buffer.numel()} entries; allowed: {math.prod(stored)}, {list(stored)}")
    padded = buffer.view(stored)
    padded = padded.mT if transposed else padded
    return padded[:, : own[1], : own[2]].contiguous() if padded.shape != own else padded


def _padded(quantizer: Quantizer, usage: str, own: tuple[int, ...]) -> tuple[tuple[int, int, int], bool]:
    """Return (the shape in which the scales [G, rows, columns] lie in a buffer, whether they lie transposed there)."""
    members, rows, columns = own
    if quantizer.FORMAT == "float8_block":
        if quantizer.symmetric:
            return (members, rows, _up(columns, 4)), False
        return (members, columns, _up(rows, 4)), True
    multiple = (4, 128) if quantizer.FORMAT == "mxfp8" and usage == "columnwise" else (128, 4)
    return (members, _up(rows, multiple[0]), _up(columns, multiple[1])), False


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _takes_flat_buffers(constructor: Callable[..., None]) -> Callable[..., None]:
    def call(self: GroupedTensorStorage, *arguments: Any, **named: Any) -> None:
        if "num_tensors" in named:
            arguments, named = from_flat(*arguments, **named), {}
        constructor(self, *arguments, **named)

    return call


GroupedTensorStorage.__init__ = _takes_flat_buffers(GroupedTensorStorage.__init__)  # type: ignore[method-assign]


class _OfGroups:
    @property
    def num_tensors(self: Any) -> int:
        """`num_gemms`."""
        return self.num_gemms

    @property
    def first_dims(self: Any) -> Tensor | None:
        """`m_splits`."""
        return self.m_splits

    def split_into_quantized_tensors(self: Any, splits: Sequence[int] | None = None) -> list[Any]:
        """Return the members as tensors that share these fields. splits: the values of m_splits; they may be left out
        on the CPU only."""
        if self.m_splits is None:
            return GroupedTensor(self.fields, self.quantizer, self.shape, self.dtype).members()
        fields = self.fields | {"m_splits": self.m_splits}
        return GroupedRows(fields, self.quantizer, self.shape, self.dtype).members(splits)


add_members(GroupedTensorStorage, _OfGroups)
