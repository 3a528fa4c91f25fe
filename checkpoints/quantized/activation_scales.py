"""Scales of activations in an export: no conversion computes with them, and they come back where files have a place.

A scale belongs to a weight (`input_scale`), or to the attention around it (`k_scale`). Where the export stores the
weight as it was, under its name or another, it has the scales that it had. In another form of the family the weight is
a part of another tensor, or consists of several; then each matrix gets the scale that its parts had, if that is one
number. A scale of gate and another one of up are none of both: such ones are named as left out. Only scales of what
goes into a matrix are shared by its parts: the scale of the keys (`k_proj.k_scale`) does not apply to queries and
values.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..families import FAMILIES
from ..folder.checkpoint import Checkpoint
from ..formats import WeightFormat
from ..formats.details import ALL
from ..formats.format import scale_beside
from ..io.boxes import Box, Shape
from ..io.dtypes import dtype_name
from ..mapping.plan import OutputTensor
from ..mapping.tensor_map import Namespace
from .row_blocks import Key, matrix_keys

_OF_INPUTS = ("input_scale", "activation_scale", "input_global_scale")


@dataclass(frozen=True)
class _Scale:
    """The scale of one matrix: the number, in the shape [1] instead of [], and the tensor that it is from."""

    number: torch.Tensor
    one: bool
    provenance: str


def scale_outputs(
    ckpt: Checkpoint,
    scales: Mapping[str, torch.Tensor],
    formats: Mapping[str, WeightFormat],
    high_precision: Namespace,
    occupied: set[str],
) -> tuple[list[OutputTensor], tuple[str, ...]]:
    """Return the outputs of an export that are scales of activations, and the names of those that it cannot have.

    Arguments:
        scales: the scales of the files that `ckpt` was imported from, by name.
        high_precision: how the export stores the model; formats: its quantized weights, each with its format.
        occupied: names that other outputs have.
    """
    source = _source(ckpt)
    scales, changed = _without_changed(scales, formats, high_precision, _stale_weights(ckpt, source))
    modules = {part for name in high_precision.stored for part in _modules(name)}
    forms = tuple(dict.fromkeys(formats.values()))
    beside = {scale_beside(weight, kind) for weight, form in formats.items() for kind in form.activations}
    beside |= {f"{module}.{kind}" for module in modules for form in forms for kind in form.attention}
    own = {n: t for n, t in scales.items() if n not in occupied and (n in beside or n.rpartition(".")[0] in modules)}
    written, used = dict(own), set(own)
    twins = _twins(high_precision, source)
    by_kind = _by_matrix(ckpt, source, scales, forms)
    for weight, keys in _matrices(high_precision, ckpt).items():
        for kind, known in by_kind.items():
            name = scale_beside(weight, kind)
            parts = [scale for key in keys if (scale := _common(known[key])) is not None]
            alike = len({(scale.number.dtype, scale.one) for scale in parts}) == 1
            free = (
                weight in formats
                and kind in formats[weight].activations
                and weight not in twins
                and name not in written
                and name not in occupied
            )
            if free and alike and len(parts) == len(keys):
                shape = (*high_precision.stored[weight].shape[:-2], *((1,) if parts[0].one else ()))
                written[name] = torch.stack([scale.number for scale in parts]).view(shape)
                used |= {scale.provenance for key in keys for scale in known[key]}
    for weight, twin in twins.items():
        kinds = formats[weight].activations if weight in formats else ()
        names = ((scale_beside(weight, kind), scale_beside(twin, kind)) for kind in kinds)
        for name, provenance in names:
            if provenance in scales and name not in written and name not in occupied:
                written[name] = scales[provenance]
                used.add(provenance)
    left_out = (*changed, *(name for name in scales if name not in used))
    return [_constant(name, value) for name, value in written.items()], left_out


def is_calibrated(formats: Mapping[str, WeightFormat], written: Collection[str]) -> bool:
    """Whether scales of inputs are written, and every quantized weight has those that others of its format have."""
    found = {
        weight: {kind for kind in form.activations if kind in _OF_INPUTS and scale_beside(weight, kind) in written}
        for weight, form in formats.items()
    }
    of_form: dict[WeightFormat, set[str]] = defaultdict(set)
    for weight, form in formats.items():
        of_form[form] |= found[weight]
    return any(of_form.values()) and all(found[weight] == of_form[form] for weight, form in formats.items())


def _stale_weights(ckpt: Checkpoint, source: Namespace | None) -> set[str]:
    """Return the weights of `source` that training changed after scales of activations were measured with them."""
    details = None if ckpt.source is None else ckpt.source.quantization
    stale = () if details is None else details.get("stale", ())
    links = () if source is None else source.links
    return {link.stored for link in links if len(link.stored_box) >= 2 and (ALL in stale or link.name in stale)}


def _without_changed(
    scales: Mapping[str, torch.Tensor],
    formats: Mapping[str, WeightFormat],
    high_precision: Namespace,
    stale: Collection[str],
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the scales, without modules whose weight was quantized and is values now, or is another one, and the
    names of these: nothing quantizes their inputs, or what they were measured on has changed."""
    forms = {*formats.values()}
    kinds = {kind for form in forms for kind in form.activations if kind in _OF_INPUTS}
    values = {name for name, its in high_precision.stored.items() if len(its.shape) == 2 and name not in formats}
    values |= {*stale}
    changed = {name.removesuffix(".weight") for name in values if any(scale_beside(name, k) in scales for k in kinds)}
    beside = {scale_beside(name, kind) for name in stale for kind in kinds}
    keys_values = {module.rpartition(".")[0] for module in changed if module.endswith((".k_proj", ".v_proj"))}
    around = {kind for form in forms for kind in form.attention}
    gone = tuple(
        name
        for name in scales
        if name.rpartition(".")[0] in changed
        or name in beside
        or any(name == f"{parent}.{kind}" for parent in keys_values for kind in around)
    )
    return {name: scale for name, scale in scales.items() if name not in gone}, gone


def _source(ckpt: Checkpoint) -> Namespace | None:
    """Return how the files that a folder was imported from store the model."""
    family = FAMILIES.get(ckpt.source.family or "") if ckpt.source is not None else None
    return family.namespace(ckpt.config, ckpt.source.form) if family is not None and ckpt.source is not None else None


def _twins(high_precision: Namespace, source: Namespace | None) -> dict[str, str]:
    """Return each stored weight that is the same part of the model as one of `source` -> that one: it has the scales
    that this one had, and no others."""
    if source is None:
        return {}
    known = {place: name for name, place in _places(source).items()}
    return {name: known[place] for name, place in _places(high_precision).items() if place in known}


def _places(namespace: Namespace) -> dict[str, tuple[tuple[str, Box], ...]]:
    """Return stored weight -> which parts of which parameters it is."""
    places: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for link in namespace.links:
        if len(link.stored_box) >= 2:
            places[link.stored].append((link.name, link.box))
    return {name: tuple(found) for name, found in places.items()}


def _by_matrix(
    ckpt: Checkpoint, source: Namespace | None, scales: Mapping[str, torch.Tensor], forms: Iterable[WeightFormat]
) -> dict[str, dict[Key, list[_Scale]]]:
    """Return the scales of inputs that parts of each matrix of the model had, by kind."""
    kinds = dict.fromkeys(kind for form in forms for kind in form.activations if kind in _OF_INPUTS)
    found: dict[str, dict[Key, list[_Scale]]] = {kind: defaultdict(list) for kind in kinds}
    if source is None:
        return found
    for weight, keys in _matrices(source, ckpt).items():
        for kind, known in found.items():
            name = scale_beside(weight, kind)
            if name in scales:
                for key, scale in zip(keys, _numbers(name, scales[name], source.stored[weight].shape[:-2])):
                    known[key].append(scale)
    return found


def _numbers(name: str, scale: torch.Tensor, leading: Shape) -> Iterator[_Scale]:
    """Yield the scale of each matrix of a weight [*leading, out, in]; none where it is no number per matrix."""
    shape, matrices = tuple(scale.shape), leading[0] if leading else 1
    if shape in ((), (1,)) and shape != leading:
        numbers = scale.flatten().expand(matrices)  # one for all of them
    elif shape in (leading, (*leading, 1)):
        numbers = scale.flatten()
    else:
        return
    yield from (_Scale(number, shape not in ((), leading), name) for number in numbers)


def _common(scales: list[_Scale]) -> _Scale | None:
    """Return the scale that all parts of a matrix share; None without one."""
    return scales[0] if len({(scale.number.dtype, float(scale.number)) for scale in scales}) == 1 else None


def _matrices(namespace: Namespace, ckpt: Checkpoint) -> dict[str, list[Key]]:
    return matrix_keys(namespace.links, ckpt.formats)


def _modules(tensor: str) -> tuple[str, str]:
    """Return the modules whose scales can be beside a weight: its own, and the attention around that."""
    module = tensor.removesuffix(".weight")
    return module, module.rpartition(".")[0]


def _constant(name: str, value: torch.Tensor) -> OutputTensor:
    return OutputTensor(name, dtype_name(value.dtype), tuple(value.shape), compute=lambda: [value])
