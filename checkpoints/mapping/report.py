"""What a conversion did to the numbers: one line for each class of tensors, in words and as JSON.

A class is a parameter without the number of its layer, in one source and one target form. Kinds:

    exact                the stored numbers equal the source's, byte for byte
    re-encoded exact     other bytes that stand for the same numbers
    re-encoded           the same, but for the rounding of one float32 factor per matrix (max relative error)
    requantized          quantized again, from the values (max error)
    dequantized          values in high precision
    converted            values in another dtype
    quantized            by `quantize`, as its recipe says
    computed             made by the conversion: routers, noise
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from te_models.sizes import plural

from ..io.header import TensorInfo
from ..io.strict_json import dump_object
from .quantized_format import SUFFIXES

if TYPE_CHECKING:
    from .plan import ConversionPlan

Kind = Literal[
    "exact", "re-encoded exact", "re-encoded", "requantized", "dequantized", "converted", "quantized", "computed"
]
REPORT = "conversion.json"
_NUMBER = re.compile(r"\.\d+(?=\.)|(?<=\.weight)\d+|(?<=\.bias)\d+")


def class_of(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and its expert."""
    return _NUMBER.sub("", name).removeprefix("decoder.layers.")


@dataclass
class ReportLine:
    """One class of tensors. max_error: the largest difference to the source's values, relative where `relative`; None
    for a class without one, or before it is known."""

    tensors: str
    kind: Kind
    source: str
    target: str
    count: int = 0
    max_error: float | None = None
    relative: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def note(self, error: float) -> None:
        """Record an error that was seen; by any thread."""
        with self._lock:
            self.max_error = max(error, self.max_error or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        error = "max_relative_error" if self.relative else "max_error"
        values = {"tensors": self.tensors, "kind": self.kind, "count": self.count}
        values |= {"source": self.source, "target": self.target}
        return values | ({error: self.max_error} if self.kind in ("requantized", "re-encoded") else {})

    def __str__(self) -> str:
        kind: str = self.kind
        if self.max_error is not None and self.kind in ("requantized", "re-encoded"):
            kind += f" (max {'relative ' if self.relative else ''}error {self.max_error:.1e})"
        return f"{self.tensors}: {plural(self.count, 'tensor')}, {self.source} -> {self.target}: {kind}"


@dataclass
class ConversionReport:
    """The lines of one conversion; errors are complete once it has been carried out."""

    lines: dict[tuple[str, str, str, str], ReportLine] = field(default_factory=dict)

    def add(self, name: str, kind: Kind, source: str, target: str) -> ReportLine:
        """Count one tensor; return the line of its class."""
        key = (class_of(name), kind, source, target)
        line = self.lines.setdefault(key, ReportLine(*key))  # type: ignore[arg-type]
        line.count += 1
        return line

    def add_exact(self, name: str, source: str, target: str, *, encoded: bool, error: float) -> None:
        """Count a tensor whose numbers are taken over. error: the largest relative one of the factors of matrices."""
        kind: Kind = "re-encoded" if error else "re-encoded exact" if encoded else "exact"
        line = self.add(name, kind, source, target)
        if error:
            line.relative = True
            line.note(error)

    def add_values(self, name: str, found: Iterable[str], target: str) -> None:
        """Count a tensor in high precision. found: the dtypes of what it is joined from."""
        source = " and ".join(sorted(set(found)))
        self.add(name, "exact" if source == target else "converted", source, target)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the lines as JSON values."""
        return [line.to_dict() for line in self.lines.values()]

    def errors(self) -> list[float | None]:
        """Return the errors so far, line by line."""
        return [line.max_error for line in self.lines.values()]

    def note_errors(self, errors: Sequence[float | None]) -> None:
        """Record what `errors` of another run of the same conversion returned."""
        for line, error in zip(self.lines.values(), errors, strict=True):
            if error is not None:
                line.note(error)

    def to_bytes(self) -> bytes:
        """Return the content of conversion.json."""
        return dump_object({"format_version": 1, "classes": self.to_dict()})

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines.values()))


Measure = Callable[[float], None]
"""Called with the largest difference between a quantized matrix and its source."""


def moved_report(
    plan: ConversionPlan,
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
