"""What a folder of ours records about the files that its weights come from, and how that differs between two."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from te_models.lazy import later

from ..families import FAMILIES
from ..formats.details import activation_scales, details_of
from ..io.dtypes import FLOATS, dtype_name, with_most_bytes
from .checkpoint import Checkpoint
from .te_folder import HFSource

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")


def provenance_source(ckpt: Checkpoint, quantized: Collection[str] | None = None) -> HFSource | None:
    """Return what a folder made from this checkpoint records about its provenance.

    quantized: the grouped-layout names of its quantized parameters; None: the names of the checkpoint.
    """
    others = quantized is not None and _are_others(ckpt, quantized)
    if ckpt.kind == "te_models" or ckpt.source is None:
        if others and ckpt.source is not None and ckpt.source.quantization is not None:
            return replace(ckpt.source, quantization={**ckpt.source.quantization, "others": True})
        return ckpt.source
    details = details_of(ckpt.quantized, others=others) if ckpt.quantized is not None and ckpt.formats else None
    return replace(ckpt.source, dtype=main_dtype(ckpt), quantization=details, tied_copies=tuple(ckpt.tied_copies))


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
    return tensor.flatten().view(torch.uint8)


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
