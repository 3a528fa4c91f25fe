"""What exporting a quantized folder does to its numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from .checkpoint import Checkpoint
from .conversion_report import ConversionReport, Kind
from .formats import WeightFormat, encode
from .formats.namespace import FieldNamespace
from .plan import Output
from .quantized_format import SUFFIXES, quantizer_of

_AMAX = SUFFIXES["rowwise_amax"]


def add_moved(
    report: ConversionReport,
    ckpt: Checkpoint,
    found: FieldNamespace,
    weight_format: WeightFormat,
    plain: list[Output],
    encoded: Collection[str],
    imported: Mapping[str, float] | None,
    amaxes: Callable[[str], torch.Tensor],
) -> None:
    """Report the quantized parameters that a format takes over, then the plain ones.

    encoded: the tensors of the format that are computed, not moved. imported: see `encode.written_number`. amaxes:
    reads a parameter's amaxes by the name of their entry.
    """
    owners = found.owners
    inexact = _number_errors(found, weight_format, imported, amaxes)
    computed = {owners[name] for name in encoded if name in owners}
    for name in found.formats:
        meta = ckpt.formats[name]
        kind: Kind = "re-encoded exact" if any(name + s in computed for s in SUFFIXES.values()) else "exact"
        copies = len(quantizer_of(name, meta)[0].stored_usages())
        what = str(meta["format"]) + (" rowwise copy" if copies > 1 else "")
        error = inexact.get(name, 0.0)
        line = report.add(name, "re-encoded" if error else kind, what, weight_format.name)
        if error:
            line.relative = True
            line.note(error)
    for output in plain:
        dtypes = " and ".join(sorted({ckpt.tensors[piece.source].dtype for piece in output.pieces}))
        name = owners.get(output.name, output.name)  # a copy of the embedding has none
        report.add(name, "exact" if dtypes == output.dtype else "converted", dtypes, output.dtype)


def _number_errors(
    found: FieldNamespace,
    weight_format: WeightFormat,
    imported: Mapping[str, float] | None,
    amaxes: Callable[[str], torch.Tensor],
) -> dict[str, float]:
    """Return parameter -> the largest relative error of the numbers of its matrices, where there is one."""
    part = weight_format.parts[-1]
    if part.meaning not in ("factor", "divisor"):
        return {}
    errors: dict[str, float] = {}
    read: dict[str, torch.Tensor] = {}
    for link in found.namespace.links:
        name = link.name.removesuffix(_AMAX)
        if link.name == name or name not in found.formats:
            continue
        if name not in read:
            read = {name: amaxes(link.name)}
        amax = read[name][tuple(r.start for r in link.box)]
        number = encode.written_number(part, amax, link.stored, imported)
        errors[name] = max(errors.get(name, 0.0), encode.number_error(part, amax, number))
    return errors
