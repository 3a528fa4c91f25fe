"""What a conversion that moves tensors, or computes them all in one way, does to their numbers."""

from __future__ import annotations

from collections.abc import Mapping

from .conversion_report import ConversionReport, Kind
from .header import TensorInfo
from .plan import Plan
from .quantized_format import SUFFIXES


def moved_report(
    plan: Plan,
    tensors: Mapping[str, TensorInfo],
    computed: Kind = "computed",
    values: Mapping[str, str] | None = None,
) -> ConversionReport:
    """Return the report of a plan on source tensors.

    computed: what happens to outputs that are not moved. values: source tensors that are the values of quantized ones,
    with their formats.
    """
    report = ConversionReport()
    fields = {name + suffix for name in plan.formats for suffix in SUFFIXES.values() if suffix}
    for output in plan.outputs:
        if output.name in fields:
            continue  # its parameter has a line
        target = str(plan.formats[output.name]["format"]) if output.name in plan.formats else output.dtype
        formats = {values[piece.source] for piece in output.pieces if values and piece.source in values}
        found = " and ".join(sorted(formats or {tensors[piece.source].dtype for piece in output.pieces}))
        if formats:
            report.add(output.name, "dequantized", found, target)
        elif output.compute is not None:
            report.add(output.name, computed, found or "values", target)
        else:
            report.add(output.name, "exact" if found == output.dtype else "converted", found, target)
    return report
