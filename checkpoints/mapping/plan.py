"""The plan of a conversion: what every output tensor is made of, decided from headers alone.

A plan exists only when it is total and bijective: every source tensor is consumed exactly once or listed as ignored,
every output element is written exactly once. Everything else is an error that names the tensors, raised before the
first byte is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from te_models.lazy import torch
from te_models.sizes import format_size, plural

from ..io.boxes import Shape, full
from ..io.dtypes import dtype_name
from ..io.errors import CheckpointError, shorten
from ..io.header import TensorInfo, byte_count
from .quantized_format import Description
from .report import ConversionReport
from .tensor_map import Namespace, Piece, TensorSpec, compose


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: moved from pieces of source tensors, or computed when its turn comes by `compute`, which
    returns it in parts along its first dimension.

    variant: what decides a computed tensor besides the source files, the configuration and the formats (a seed).
    owner: outputs in a row with the same owner are computed together, so they go to one file; "": alone.
    """

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...] = ()
    compute: Callable[[], Iterable[torch.Tensor]] | None = field(default=None, compare=False)
    variant: str = ""
    owner: str = ""

    @property
    def nbytes(self) -> int:
        return byte_count(self.dtype, self.shape)


@dataclass(frozen=True)
class ConversionPlan:
    """Outputs in order, source tensors that are left out on purpose, the formats of quantized outputs, and the names of
    those outputs that are no part of the model but travel along.

    metadata: entries of every file's header besides these formats. report: what the conversion does to numbers. notes:
    what a user should know of the result besides, one sentence each.
    """

    outputs: tuple[OutputTensor, ...]
    ignored: tuple[str, ...] = ()
    formats: Mapping[str, Description] = field(default_factory=dict)
    passthrough: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    report: ConversionReport | None = None
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data that the plan writes."""
        return sum(output.nbytes for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values: each output with its dtype, shape and source tensors."""
        return {
            "tensors": len(self.outputs),
            "bytes": self.total_bytes,
            "dtypes": dict(Counter(output.dtype for output in self.outputs)),
            "ignored": list(self.ignored),
            "carried": list(self.passthrough),
            "classes": None if self.report is None else self.report.to_dict(),
            "notes": list(self.notes),
            "outputs": [
                {
                    "name": o.name,
                    "dtype": o.dtype,
                    "shape": list(o.shape),
                    "from": list(dict.fromkeys(p.source for p in o.pieces)) if o.compute is None else "computed",
                }
                for o in self.outputs
            ],
        }

    def __str__(self) -> str:
        lines = [f"{plural(len(self.outputs), 'tensor')}, {format_size(self.total_bytes)}"]
        for o in self.to_dict()["outputs"]:
            sources = o["from"] if isinstance(o["from"], str) else shorten(o["from"], 3)
            lines.append(f"  {o['name']}  {o['dtype']} {o['shape']}  <-  {sources}")
        if self.ignored:
            lines.append(f"  left out: {', '.join(self.ignored)}")
        return "\n".join(lines)


def make_plan(
    tensors: Mapping[str, TensorInfo],
    source: Namespace,
    target: Namespace,
    *,
    where: str,
    dtype: torch.dtype | None = None,
    unused: Collection[str] = (),
    passthrough: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
) -> ConversionPlan:
    """Plan the conversion of `tensors`, stored as `source` says, to the tensors of `target`.

    Arguments:
        where: names the source folder in errors.
        dtype: convert weights to it; None keeps every tensor's dtype, and those that are joined must have the same.
        unused: source tensors that are no part of the model; those that are not passed through are left out.
        passthrough: the unused tensors that are copied byte for byte, with the names of the copies.
        copies: names of further outputs -> the outputs that they repeat.
    """
    match_tensors(tensors, source.stored, where=where, unused=unused)
    passthrough = passthrough or {}
    source.check()
    target.check()
    outputs = []
    for name, pieces in compose(source, target).items():
        stored = target.stored[name]
        found = {tensors[piece.source].dtype for piece in pieces}
        if dtype is not None and stored.convertible:
            found = {dtype_name(dtype)}
        if len(found) != 1:
            parts = shorten((f"{piece.source} ({tensors[piece.source].dtype})" for piece in pieces), 8)
            raise CheckpointError(
                f"{where}: {name} would be joined from different dtypes, {parts}; choose one with dtype"
            )
        outputs.append(OutputTensor(name, found.pop(), stored.shape, tuple(pieces)))
    by_name = {output.name: output for output in outputs}
    outputs += [replace(by_name[original], name=copy) for copy, original in (copies or {}).items()]
    outputs += [copy_of(tensors[name], name, copy) for name, copy in passthrough.items()]
    ignored = tuple(name for name in tensors if name in unused and name not in passthrough)
    return ConversionPlan(tuple(outputs), ignored, passthrough=tuple(passthrough.values()))


def copy_of(info: TensorInfo, name: str, copy: str) -> OutputTensor:
    """Return the output named `copy` that has the bytes of the source tensor `name`, whatever its dtype."""
    piece = Piece(name, full(info.shape), full(info.shape), tuple(range(len(info.shape))))
    return OutputTensor(copy, info.dtype, info.shape, (piece,))


def match_tensors(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, TensorSpec], *, where: str, unused: Collection[str] = ()
) -> None:
    """Check that a checkpoint has exactly the expected tensors, and `unused` ones."""
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected and name not in unused]
    problems = []
    renamed = _renamed(missing, extra, tensors, expected)
    if renamed:
        problems.append("renamed: " + shorten(f"{new} (expected {old})" for old, new in renamed))
        missing = [name for name in missing if name not in dict(renamed)]
        extra = [name for name in extra if name not in {new for _, new in renamed}]
    if missing:
        problems.append(f"missing: {shorten(missing)}")
    if extra:
        problems.append(f"not part of this model: {shorten(extra)}")
    for name, stored in expected.items():
        info = tensors.get(name)
        if info is not None and info.shape != stored.shape:
            problems.append(f"{name!r} has shape {list(info.shape)} where {list(stored.shape)} is expected")
        elif info is not None and info.dtype not in stored.dtypes:
            allowed = " or ".join(sorted(stored.dtypes))
            problems.append(f"{name!r} has dtype {info.dtype} where {allowed} is expected")
    if problems:
        more = f"; and {plural(len(problems) - 4, 'more problem')}" if len(problems) > 4 else ""
        raise CheckpointError(f"the tensors of {where} do not fit its configuration: {'; '.join(problems[:4])}{more}")


def _renamed(
    missing: list[str], extra: list[str], tensors: Mapping[str, TensorInfo], expected: Mapping[str, TensorSpec]
) -> list[tuple[str, str]]:
    """Pairs (expected, found) that look like one tensor under another name: the only candidates for each other."""
    if len(missing) != 1 or len(extra) != 1 or tensors[extra[0]].shape != expected[missing[0]].shape:
        return []
    return [(missing[0], extra[0])]
