"""What a folder of ours records about the files that its weights come from, and how that differs between two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from te_models.lazy import torch

from ..families import FAMILIES
from ..formats.details import ALL, activation_scales, details_of
from ..io.dtypes import FLOATS, dtype_name, torch_dtype, with_most_bytes
from ..io.errors import shorten
from ..mapping.param_shapes import EXPERT_BIAS, ExpertLayout
from ..mapping.parameters import StoredParameters
from ..mapping.plan import ConversionPlan
from ..mapping.quantized_format import SUFFIXES
from ..mapping.te_namespace import parameter_names
from .checkpoint import Checkpoint
from .te_folder import HFSource


def provenance_source(ckpt: Checkpoint, quantized: Collection[str] | None = None) -> HFSource | None:
    """Return what a folder made from this checkpoint records about its provenance.

    quantized: the grouped-layout names of its quantized parameters; None: the names of the checkpoint.
    """
    others = quantized is not None and _are_others(ckpt, quantized)
    if ckpt.source is None:
        return None
    source = replace(ckpt.source, bias_dtype=_bias_dtype(ckpt) or ckpt.source.bias_dtype)
    if ckpt.kind == "te_models":
        if others and source.quantization is not None:
            return replace(source, quantization={**source.quantization, "others": True})
        return source
    details = details_of(ckpt.quantized, others=others) if ckpt.quantized is not None and ckpt.formats else None
    return replace(source, dtype=main_dtype(ckpt), quantization=details, tied_copies=tuple(ckpt.tied_copies))


def _bias_dtype(ckpt: Checkpoint) -> str | None:
    """Return the dtype that all biases which choose experts have; None where that is float32, or they differ."""
    names = {link.stored for link in ckpt.namespace.links if link.name.endswith(EXPERT_BIAS)}
    found = {ckpt.tensors[name].dtype for name in names}
    return found.pop() if len(found) == 1 and "F32" not in found else None


def with_bias_dtype(plan: ConversionPlan, ckpt: Checkpoint) -> ConversionPlan:
    """Return an export's plan in which biases that choose experts have the dtype of the files that the model came from,
    where that holds their numbers: a model has them in float32."""
    own = None if ckpt.source is None else ckpt.source.bias_dtype
    if own is None:
        return plan
    outputs, wider = list(plan.outputs), []
    for number, output in enumerate(outputs):
        source = output.pieces[0].source if len(output.pieces) == 1 else ""
        if source.endswith(EXPERT_BIAS) and output.dtype == "F32":
            values = ckpt.files.view(source)
            if torch.equal(values.to(torch_dtype(own)).to(values.dtype), values):
                outputs[number] = replace(output, dtype=own)
            else:
                wider.append(output.name)
    note = (
        f"biases that choose experts ({shorten(wider, 2)}) stay float32: {own} would round what training made of them"
    )
    return replace(plan, outputs=tuple(outputs), notes=(*plan.notes, *([note] if wider else [])))


def with_stale_weights(
    source: HFSource | None,
    ckpt: Checkpoint | None,
    layout: ExpertLayout,
    quantized: Set[str],
    entries: Container[str],
    read: Callable[[str], torch.Tensor],
) -> HFSource | None:
    """Return `source` with the quantized parameters that training changed, if scales of activations were measured with
    what they were: exports leave those scales out.

    ckpt: the folder that the model came from, open; None: it is gone, and nothing shows that a parameter is the same.
    quantized: names in `layout` of quantized parameters. entries: names of what files will hold; read: returns one.
    """
    if source is None or source.quantization is None or not source.quantization["activations"]:
        return source
    stale = set(source.quantization.get("stale", ()))
    if ckpt is None:
        stale |= {ALL}
    else:
        stored = StoredParameters(ckpt.store, ckpt.namespace, ckpt.config, ckpt.formats, layout)
        for name, members in parameter_names(ckpt.config, layout).items():
            if name in ckpt.formats and quantized >= {*members}:
                own = (member + suffix for member in members for suffix in SUFFIXES.values())
                both = [entry for entry in own if entry in stored.tensors and entry in entries]
                both.sort(key=lambda entry: stored.tensors[entry].nbytes)  # training changes scales, too
                if not all(_is_same(read(entry), stored.entry(entry)) for entry in both):
                    stale.add(name)
    return replace(source, quantization={**source.quantization, "stale": sorted(stale)}) if stale else source


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes(a.cpu()), _bytes(b))


def _are_others(ckpt: Checkpoint, quantized: Collection[str]) -> bool:
    """Whether quantized parameters are not just the weights that are quantized in the files: parts of a parameter may
    not have been, and an output layer is stored as values."""
    if ckpt.quantized is None or ckpt.source is None:
        return set(quantized) != ckpt.formats.keys()
    high_precision = FAMILIES[ckpt.family or ""].namespace(ckpt.config, ckpt.source.form)
    return {link.stored for link in high_precision.links if link.name in quantized} != set(ckpt.quantized.weights)


def differing_scales(left: Checkpoint, right: Checkpoint) -> Iterator[str]:
    """Yield what differs between the scales of activations of two folders, if their files are, or were, of one kind."""
    (a, ours), (b, theirs) = _scales_of(left), _scales_of(right)
    if a is None or a != b:
        return
    for name in {**ours, **theirs}:
        x, y = ours.get(name), theirs.get(name)
        if x is None or y is None:
            yield f"{name}: only in {right.path if x is None else left.path}"
        elif (x.dtype, x.shape) != (y.dtype, y.shape) or not torch.equal(_bytes(x), _bytes(y)):
            yield f"{name}: {x.flatten()[:4].tolist()} and {y.flatten()[:4].tolist()}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _scales_of(ckpt: Checkpoint) -> tuple[tuple[Any, ...] | None, Mapping[str, torch.Tensor]]:
    """Return the kind of a folder's files, or of those that it was imported from, and their scales of activations."""
    if ckpt.source is None:
        return None, {}
    known = ckpt.source.quantization
    if ckpt.quantized is not None:
        declaration = ckpt.quantized.declaration
        scales = {name: ckpt.files.view(name) for name in ckpt.quantized.activations}
    elif known is not None and not known.get("others", False):
        from ..formats import parse

        declaration = parse(ckpt.source.config, known["separate"])
        scales = activation_scales(known)
    else:
        return None, {}
    return (ckpt.source.family, ckpt.source.form, declaration and declaration.format.name), scales


def main_dtype(ckpt: Checkpoint) -> str:
    """Return the dtype that most bytes of a checkpoint's plain weights have; float32 where there are none."""
    if ckpt.quantized is not None:
        return dtype_name(ckpt.quantized.dtype)
    high_precision = (ckpt.tensors[name] for name, stored in ckpt.namespace.stored.items() if stored.dtypes == FLOATS)
    return with_most_bytes(((info.dtype, info.nbytes) for info in high_precision), "F32")
