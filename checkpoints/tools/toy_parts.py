"""What a toy model takes of each file's tensors: the whole, or the first of its experts.

The hidden sizes stay, so a cut never goes through the blocks of a quantized weight: each of its tensors is cut where
the weight is, along the dimensions before its rows and columns.

Of the tensors that the model does not use, above all the layers that predict further tokens are kept. Such a layer
holds a layer of the model among other things. So a tensor in it whose name ends like a tensor in a layer with
experts is cut as that one is, and all others are whole. Layers behind the last one of the model get the numbers behind
the last one of the toy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from te_models.config import ModelConfig

from ..families import Family
from ..folder.checkpoint import Checkpoint
from ..formats.format import WeightFormat, scale_beside
from ..formats.fp8 import scale_in_files
from ..formats.packed_columns import column_name
from ..formats.stacks import stacked_name
from ..io.boxes import Shape, full, intersect, tiles
from ..io.errors import CheckpointError, shorten
from ..mapping.plan import ConversionPlan, OutputTensor, copy_of
from ..mapping.tensor_map import Link, Namespace, Piece, compose

if TYPE_CHECKING:
    from .toy_parts import ToyPart


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ToyPart:
    """The part of a checkpoint that is taken: `config` describes it, `chosen` are the numbers of its layers."""

    checkpoint: Checkpoint
    family: Family
    form: str | None
    config: ModelConfig
    chosen: tuple[int, ...]

    @cached_property
    def whole(self) -> Namespace:
        """How the files store the model, quantized weights as if they were plain."""
        return self.family.namespace(self.checkpoint.config, self.form)

    @cached_property
    def names_of_layers(self) -> re.Pattern[str]:
        """Matches the beginning of a name in a layer; group 1 is the layer's number."""
        names = self.family.names if self.form is None else self.family.forms[self.form]
        return re.compile(re.escape(names.layer).replace(r"\{i\}", r"(\d+)") + r"(?=[.*]|$)")

    def renamed(self, name: str) -> str | None:
        """Return the name with the new number of its layer; None where that is not taken. Layers behind the model's
        that predict further tokens follow the layers that are kept."""
        match = self.names_of_layers.match(name)
        if match is None:
            return name
        number, layers = int(match[1]), self.checkpoint.config.num_layers
        if number not in self.chosen and number < layers:
            return None
        new = self.chosen.index(number) if number < layers else len(self.chosen) + number - layers
        return f"{name[: match.start(1)]}{new}{name[match.end(1) :]}"


def cut(part: ToyPart) -> tuple[ConversionPlan, bool]:
    """Return the plan that writes the part from the checkpoint's files, and whether it has quantized weights."""
    ckpt, files = part.checkpoint, part.checkpoint.files.tensors
    target = part.family.namespace(part.config, part.form)
    target.check()
    quantized = set(ckpt.quantized.weights) if ckpt.quantized is not None else set()
    outputs: list[OutputTensor] = []
    found = False
    for name, pieces in compose(Namespace(target.canonical, {}, _kept(part, target)), target).items():
        source, shape = pieces[0].source, target.stored[name].shape
        same = all(piece.source == source and piece.source_box == piece.box for piece in pieces)
        if not same or not tiles([piece.box for piece in pieces], shape):
            raise CheckpointError(f"{name} cannot be cut out of {shorten({piece.source for piece in pieces})}")
        if source in quantized:
            outputs += _quantized(part, source, name, shape)
            found = True
        else:
            outputs.append(OutputTensor(name, files[source].dtype, shape, tuple(pieces)))
    outputs += _further(part)
    outputs += (copy_of(files[copy], copy, copy) for copy in ckpt.tied_copies)
    unused = list(unused_outputs(part, target))
    passthrough = tuple(output.name for output in unused)
    return ConversionPlan((*outputs, *unused), passthrough=passthrough), found


def renumbered(declaration: Mapping[str, Any], part: ToyPart) -> dict[str, Any]:
    """Return a declaration of quantization whose lists name the layers that are taken, by their new numbers."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            keys = ((part.renamed(key), inner) for key, inner in value.items())  # layers of ModelOpt are keys
            return {key: walk(inner) for key, inner in keys if key is not None}
        if isinstance(value, list):
            names = (part.renamed(inner) if isinstance(inner, str) else walk(inner) for inner in value)
            return [name for name in names if name is not None]
        return value

    return walk(dict(declaration))


def _quantized(part: ToyPart, source: str, name: str, shape: Shape) -> Iterator[OutputTensor]:
    """Yield the tensors of a quantized weight, and of its activations' scales."""
    ckpt, whole = part.checkpoint, part.whole.stored[source].shape
    assert ckpt.quantized is not None, "called for quantized weights only"
    if shape[-2:] != whole[-2:]:
        raise CheckpointError(f"{name} cannot be cut out of {source}, which is quantized")
    form = ckpt.quantized.formats[source]
    for p in form.parts:
        old, new = source + p.suffix, name + p.suffix
        if old in ckpt.quantized.scales:
            old, new = ckpt.quantized.scales[old], scale_in_files(new)
        elif old not in ckpt.files.tensors and form.packing is None:
            old, new = stacked_name(source, p), stacked_name(name, p)  # of a stack of experts: that tells it
        yield _first(part, *_stored_names(form, source, name, old, new), shape[:-2], whole[:-2])
    for beside in form.beside:
        if source + beside.suffix in ckpt.quantized.files.tensors:
            old, new = source + beside.suffix, name + beside.suffix
            yield _first(part, *_stored_names(form, source, name, old, new), (), ())
    for kind in form.activations:
        scale = scale_beside(source, kind)
        if scale in ckpt.quantized.activations:
            yield _first(part, scale, scale_beside(name, kind), shape[:-2], whole[:-2])


def _stored_names(form: WeightFormat, source: str, name: str, old: str, new: str) -> tuple[str, str]:
    """Return what files call two parts of weights whose packed columns are modules."""
    if form.packing is None:
        return old, new
    return column_name(source, old), column_name(name, new)


def _first(part: ToyPart, source: str, name: str, leading: Shape, whole: Shape) -> OutputTensor:
    """Return the output that is the beginning of a tensor [*whole, ...] along these dimensions, or all of another."""
    info = part.checkpoint.files.tensors[source]
    shape = (*leading, *info.shape[len(leading) :]) if info.shape[: len(whole)] == whole else info.shape
    box = full(shape)
    return OutputTensor(name, info.dtype, shape, (Piece(source, box, box, tuple(range(len(shape)))),))


def _further(part: ToyPart) -> Iterator[OutputTensor]:
    """Yield the scales of activations that belong to no weight of their own: the scales of a layer's cache."""
    quantized = part.checkpoint.quantized
    if quantized is None:
        return
    owned = {scale_beside(weight, kind) for weight, form in quantized.formats.items() for kind in form.activations}
    for scale in quantized.activations:
        name = part.renamed(scale)
        if scale not in owned and name is not None:
            yield copy_of(quantized.files.tensors[scale], scale, name)


def _kept(part: ToyPart, small: Namespace) -> tuple[Link, ...]:
    """Return the links of the files to the canonical tensors of the part."""
    links = []
    for link in part.whole.links:
        match, name = _LAYER.fullmatch(link.name), link.name
        if match is not None:
            if int(match[1]) not in part.chosen:
                continue
            name = f"decoder.layers.{part.chosen.index(int(match[1]))}.{match[2]}"
        if name not in small.canonical:  # a block that none of these layers uses
            continue
        common = intersect(link.box, full(small.canonical[name]))
        if common is not None:
            links.append(Link(name, common, link.stored, link.stored_part(common), link.axes))
    return tuple(links)


def unused_outputs(part: ToyPart, target: Namespace) -> Iterator[OutputTensor]:
    """Yield what the toy has of the tensors that the model does not use: not the tensors of layers and experts that are
    not taken. target: how the toy is stored."""
    files, layer = part.checkpoint.files.tensors, _layer_with_experts(part, target)
    for name in part.checkpoint.passthrough:
        info, new = files[name], part.renamed(name)
        shape = info.shape if layer is None or part.family.unused.is_beside(name) else layer.cut(name, info.shape)
        if new is not None and shape is not None:
            box = full(shape)
            yield OutputTensor(new, info.dtype, shape, (Piece(name, box, box, tuple(range(len(shape)))),))


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer with experts, by their names within it, whole and cut; beside: names of tensors that
    belong to one of these weights -> that weight."""

    whole: Mapping[str, Shape]
    small: Mapping[str, Shape]
    beside: Mapping[str, str]

    def cut(self, name: str, shape: Shape) -> Shape | None:
        """Return the shape of what is taken of a tensor, from its beginning on; None: nothing of it."""
        words = name.split(".")
        for first in range(len(words)):
            tail = ".".join(words[first:])
            weight = self.beside.get(tail, tail)
            if weight not in self.whole:
                continue
            if weight not in self.small:
                return None
            whole, small = self.whole[weight], self.small[weight]
            if shape == whole:
                return small
            leading = len(whole) - 2  # scales have a number, or blocks, per matrix
            return (*small[:leading], *shape[leading:]) if leading > 0 and shape[:leading] == whole[:leading] else shape
        return shape


def _layer_with_experts(part: ToyPart, target: Namespace) -> _Layer | None:
    """Return a layer of the model that has experts and is taken; None where no model has any."""
    config = part.checkpoint.config
    moved = [i for i in part.chosen if config.is_moe_layer(i)]
    if not moved:
        return None
    names = part.family.names if part.form is None else part.family.forms[part.form]
    numbers = (moved[0], part.chosen.index(moved[0]))
    whole, small = (_within(space, f"{names.layer.format(i=i)}.") for space, i in zip((part.whole, target), numbers))
    beside: dict[str, str] = {}
    if part.checkpoint.quantized is not None:
        for weight_format in part.checkpoint.quantized.format.formats:
            for weight in whole:
                further = (*weight_format.parts, *weight_format.beside)
                parts = [weight + scale.suffix for scale in further if scale.suffix]
                beside |= dict.fromkeys((*parts, *map(scale_in_files, parts)), weight)
                beside |= {scale_beside(weight, kind): weight for kind in weight_format.activations}
    return _Layer(whole, small, beside)


def _within(namespace: Namespace, prefix: str) -> dict[str, Shape]:
    """Return the shapes of a layer's stored tensors by their names without the prefix."""
    return {n.removeprefix(prefix): s.shape for n, s in namespace.stored.items() if n.startswith(prefix)}
