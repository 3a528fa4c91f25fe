"""What a folder of ours records about the files that its weights come from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .checkpoint import Checkpoint
from .dtypes import FLOATS, dtype_name, with_most_bytes
from .families import FAMILIES
from .formats.details import details_of
from .te_folder import Source


def source_of(ckpt: Checkpoint, quantized: Collection[str] | None = None) -> Source | None:
    """Return what a folder made from this checkpoint records about its origin.

    quantized: the grouped-layout names of its quantized parameters; None: those of the checkpoint.
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
    plain = FAMILIES[ckpt.family or ""].namespace(ckpt.config, ckpt.source.form)
    return {link.stored for link in plain.links if link.name in quantized} != set(ckpt.quantized.weights)


def main_dtype(ckpt: Checkpoint) -> str:
    """Return the dtype that most bytes of a checkpoint's plain weights have; float32 where there are none."""
    if ckpt.quantized is not None:
        return dtype_name(ckpt.quantized.dtype)
    plain = (ckpt.tensors[name] for name, stored in ckpt.namespace.stored.items() if stored.dtypes == FLOATS)
    return with_most_bytes(((info.dtype, info.nbytes) for info in plain), "F32")
