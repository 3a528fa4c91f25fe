"""From a family's weight map to one of quantized fields: which part of which file's tensor is which part of a field.

A weight map says where the rows and columns of a parameter are. A field has an entry per block of them, so a link of
the map is one of the field too, divided by the block, wherever it does not cut one. Then quantized weights are stacked,
joined and split as plain ones are, and no number changes; where a block is cut there is no such link, and no exact way.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from te_models.layers.quantizer import Quantizer

from ..io.boxes import Box, Range, Shape, extents
from ..mapping.quantized_format import SUFFIXES, Description, field_specs, quantized_metadata
from ..mapping.tensor_map import Link, Namespace, TensorSpec
from .format import WeightFormat
from .views import Block, field_blocks


class InexactError(Exception):
    """Why a parameter cannot take over the numbers of its files."""


@dataclass
class FieldNamespace:
    """How quantized files store a model, in fields where that is exact and in values elsewhere.

    formats: parameters in fields -> description. fields: name of a stored part -> the field that it is seen as.
    repeats: name of a per-matrix number -> the equal one that stands for it. inexact: other quantized parameters ->
    why.
    """

    namespace: Namespace
    formats: dict[str, Description] = field(default_factory=dict)
    fields: dict[str, TensorSpec] = field(default_factory=dict)
    repeats: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)

    @property
    def owners(self) -> dict[str, str]:
        """Name of each stored tensor -> the entry of ours that it is (part of)."""
        return {link.stored: link.name for link in self.namespace.links}


def upright(namespace: Namespace, weights: Collection[str]) -> Namespace:
    """Return a family's namespace with these stored weights as [..., out, in]: quantized ones always are."""
    stored = dict(namespace.stored)
    links = []
    for link in namespace.links:
        last = link.axes[-2:]
        if link.stored in weights and len(last) == 2 and None not in last and last[0] > last[1]:  # type: ignore[operator]
            shape = namespace.stored[link.stored].shape
            stored[link.stored] = replace(namespace.stored[link.stored], shape=(*shape[:-2], shape[-1], shape[-2]))
            box = link.stored_box
            link = replace(
                link, stored_box=(*box[:-2], box[-1], box[-2]), axes=(*link.axes[:-2], link.axes[-1], link.axes[-2])
            )
        links.append(link)
    return replace(namespace, stored=stored, links=tuple(links))


def field_namespace(
    high_precision: Namespace,
    formats: Mapping[str, WeightFormat],
    quantizers: Mapping[str, Quantizer],
    dtype: torch.dtype,
    same: Callable[[str, str], bool],
) -> FieldNamespace:
    """Return the namespace of fields for an upright family namespace in which weights are quantized.

    Arguments:
        formats: quantized stored weight -> its format.
        quantizers: the form of each parameter that is to be in fields; the others are in values.
        dtype: the logical dtype.
        same: whether two per-matrix numbers in files are equal, so that one can stand for both.
    """
    by_name: dict[str, list[Link]] = defaultdict(list)
    for link in high_precision.links:
        by_name[link.name].append(link)
    canonical: dict[str, Shape] = {}
    stored: dict[str, TensorSpec] = {}
    links: list[Link] = []
    result = FieldNamespace(high_precision)
    for name, shape in high_precision.canonical.items():
        if name in quantizers:
            try:
                parts = _Parameter(name, shape, by_name[name], high_precision, formats, quantizers[name], dtype)
                parts.build(same)
            except InexactError as error:
                result.inexact[name] = str(error)
            else:
                canonical |= parts.canonical
                stored |= parts.stored
                links += parts.links
                result.fields |= parts.stored
                result.repeats |= parts.repeats
                result.formats[name] = parts.meta
                continue
        canonical[name] = shape
        stored |= {link.stored: high_precision.stored[link.stored] for link in by_name[name]}
        links += by_name[name]
    result.namespace = Namespace(canonical, stored, tuple(links))
    return result


class _Parameter:
    """One parameter in fields."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        links: list[Link],
        high_precision: Namespace,
        formats: Mapping[str, WeightFormat],
        quantizer: Quantizer,
        dtype: torch.dtype,
    ) -> None:
        self._name, self._shape, self._sources = name, shape, links
        self._blocks = field_blocks(quantizer)
        self.meta = quantized_metadata(quantizer, dtype)
        self._specs = field_specs(name, shape, self.meta)
        self._shapes = {link.stored: high_precision.stored[link.stored].shape for link in links}
        outsiders = [link.stored for link in links if link.stored not in formats]
        if outsiders:
            raise InexactError(f"{outsiders[0]!r} is not quantized, and other parts of it are")
        kinds = {formats[link.stored]: link.stored for link in links}
        if len(kinds) > 1:
            one, two = list(kinds.values())[:2]
            raise InexactError(f"{one!r} and {two!r} are in formats of their own")
        (self._format,) = kinds
        if any(link.axes[-2:] != (len(shape) - 2, len(shape) - 1) for link in links):
            raise InexactError("its files hold it transposed")
        self.canonical: dict[str, Shape] = {}
        self.stored: dict[str, TensorSpec] = {}
        self.links: list[Link] = []
        self.repeats: dict[str, str] = {}
        self._matrices: dict[tuple[str, Box], Link] = {}

    def build(self, same: Callable[[str, str], bool]) -> None:
        """Make the links of all fields; InexactError if no format can."""
        for part in self._format.parts:
            suffix, block = SUFFIXES[f"rowwise_{part.field}"], self._blocks[part.field]
            self.canonical[self._name + suffix] = self._specs[suffix].shape
            specs = {shape: field_specs(self._name, shape, self.meta)[suffix] for shape in set(self._shapes.values())}
            for weight, shape in self._shapes.items():
                self.stored[weight + part.suffix] = specs[shape]
            for link in self._sources:
                stored = link.stored + part.suffix
                if block is None:
                    self._link_matrix(link, self._name + suffix, stored, same)
                else:
                    self.links.append(self._divided(link, self._name + suffix, stored, block))
        for name in self.repeats:
            del self.stored[name]

    def _divided(self, link: Link, name: str, stored: str, block: Block) -> Link:
        box, stored_box = (
            divide(link.box, self._shape, block),
            divide(link.stored_box, self._shapes[link.stored], block),
        )
        if box is None or stored_box is None or extents(box[-2:]) != extents(stored_box[-2:]):
            rows = link.box[-2]
            raise InexactError(
                f"{link.stored!r} fills rows {rows.start} to {rows.stop} of it, which cuts blocks of {block[0]} rows"
            )
        return Link(name, box, stored, stored_box, link.axes)

    def _link_matrix(self, link: Link, name: str, stored: str, same: Callable[[str, str], bool]) -> None:
        new = Link(name, link.box[:-2], stored, link.stored_box[:-2], link.axes[:-2])
        other = self._matrices.setdefault((name, new.box), new)
        if other is new:
            self.links.append(new)
        elif other.stored != stored:
            if other.stored_box != new.stored_box or not same(other.stored, stored):
                raise InexactError(f"{other.stored!r} and {stored!r} differ, and it has one scale for both")
            self.repeats[stored] = other.stored


def divide(box: Box, shape: Shape, block: Block) -> Box | None:
    """Return the blocks that a part [..., rows, columns] of a tensor consists of; None where it cuts one."""
    result = list(box[:-2])
    for r, n, size in zip(box[-2:], shape[-2:], block):
        if size == 1:
            result.append(r)
        elif r.step != 1 or r.start % size or (r.stop % size and r.stop != n):
            return None
        else:
            result.append(Range(r.start // size, -(-r.stop // size)))
    return tuple(result)
