"""How two folders differ: configuration, tensors, and by how much their values do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from te_models.lazy import torch

from ..folder.checkpoint import Checkpoint
from ..folder.passthrough import our_names
from ..io.buffers import Ring
from ..io.dtypes import torch_dtype_name
from ..io.store import Store
from ..io.threads import Progress
from ..mapping.param_shapes import expected_tensors
from ..mapping.parameters import StoredParameters
from ..mapping.plan import OutputTensor, copy_of
from .conversion import PathLike
from .verify import (
    VerifyReport,
    canonical_outputs,
    compare_bits,
    differing_config,
    equal_parts,
    open_pair,
    output_layers,
)

if TYPE_CHECKING:
    from ..quantized.dequantized_store import ValueStore


_PART = 1 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """One parameter whose values differ: how many elements, the largest difference, and the root mean square of the
    differences divided by the norm of A's values."""

    name: str
    differing: int
    elements: int
    largest: float
    relative: float


@dataclass
class DiffReport:
    """The result. config: field -> the two values. notes: everything that is not a difference of values."""

    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    equal_tensors: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.config or self.notes or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; differences that are no numbers are None."""
        tensors = [
            {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in vars(t).items()}
            for t in self.tensors
        ]
        config = {name: list(values) for name, values in self.config.items()}
        return {
            "equal": self.equal,
            "config": config,
            "notes": self.notes,
            "tensors": tensors,
            "equal_tensors": self.equal_tensors,
        }


def diff(a: PathLike, b: PathLike, *, progress: Progress | None = None) -> DiffReport:
    """Compare two folders of either kind: configuration and parameters, as in the grouped layout.

    Quantized parameters are compared by the values that they stand for. `verify` compares bits and stops early; this
    measures. The tensors of the report are in the order of their relative difference, the largest first.
    """
    report = DiffReport()
    with open_pair(a, b) as (left, right):
        report.config |= differing_config(left, right)
        shapes, other = expected_tensors(left.config), expected_tensors(right.config)
        common = [name for name in shapes if shapes[name] == other.get(name)]
        for name in {**shapes, **other}:
            if name not in shapes or name not in other:
                report.notes.append(f"{name}: only in {a if name in shapes else b}")
            elif shapes[name] != other[name]:
                report.notes.append(f"{name}: {list(shapes[name])} and {list(other[name])}")
        both = [StoredParameters(c.store, c.namespace, c.config, c.formats, "grouped") for c in (left, right)]
        quantized = [{name: (p.shapes[name], meta) for name, meta in p.formats.items()} for p in both]
        value_stores = [_value_store(p, found) if found else None for p, found in zip(both, quantized)]
        (mine, theirs), rings = (canonical_outputs(ckpt) for ckpt in (left, right)), (Ring(), Ring())
        total, done = sum(math.prod(shapes[name]) for name in common), 0
        for name in common:
            kinds = [_kind(parameters, name) for parameters in both]
            if kinds[0] != kinds[1]:
                report.notes.append(f"{name}: {kinds[0]} and {kinds[1]}")
            if kinds[0] == kinds[1] and _same_bits(left, mine.get(name), right, theirs.get(name), rings):
                report.equal_tensors += 1
            else:
                values = (_values(*of_one, name) for of_one in zip(both, value_stores))
                found = _compare(name, math.prod(shapes[name]), *values)
                if found.differing:
                    report.tensors.append(found)
                else:
                    report.equal_tensors += 1
            done += math.prod(shapes[name])
            if progress is not None:
                progress(done, total)
        _compare_passthrough(report, left, right)
    report.tensors.sort(key=lambda t: -t.relative if math.isfinite(t.relative) else -math.inf)
    return report


def _value_store(parameters: StoredParameters, quantized: dict[str, Any]) -> ValueStore:
    from ..quantized.dequantized_store import ValueStore

    return ValueStore(cast(Store, parameters), quantized, torch.float32)


def _kind(parameters: StoredParameters, name: str) -> str:
    if name in parameters.formats:
        return str(parameters.formats[name]["format"])
    return " with ".join(sorted(map(torch_dtype_name, parameters.dtype_names(name))))


def _same_bits(
    left: Checkpoint, a: OutputTensor | None, right: Checkpoint, b: OutputTensor | None, rings: tuple[Ring, Ring]
) -> bool:
    """Whether a plain parameter is stored with the same bytes; None: it is quantized."""
    report = VerifyReport()
    if a is None or b is None:
        return False
    compare_bits(report, left, a, right, b, rings)
    return report.equal


def _values(parameters: StoredParameters, store: ValueStore | None, name: str) -> Iterator[torch.Tensor]:
    """Yield the values of a parameter as float32 or wider [n], some rows at a time."""
    shape = parameters.shapes[name]
    if store is not None and name in parameters.formats:
        yield from map(torch.flatten, store.bands(name))
        return
    rows = max(1, _PART // max(1, math.prod(shape[1:])))
    for begin in range(0, shape[0], rows):
        part = parameters.part(name, 0, begin, min(begin + rows, shape[0]))
        yield part.to(torch.promote_types(part.dtype, torch.float32)).flatten()


def _compare(name: str, elements: int, a: Iterator[torch.Tensor], b: Iterator[torch.Tensor]) -> TensorDifference:
    differing, largest, squares, reference = 0, 0.0, 0.0, 0.0
    for x, y in equal_parts(a, b, torch.Tensor.numel):
        difference = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
        differing += int(torch.count_nonzero(difference))  # NaN counts
        largest = max(largest, math.nan if difference.isnan().any() else float(difference.max()), key=_nan_last)
        squares += float(difference.double().square().sum())
        reference += float(x.double().square().sum())
    relative = math.sqrt(squares / reference) if reference else (math.inf if squares else 0.0)
    return TensorDifference(name, differing, elements, largest, relative)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _compare_passthrough(report: DiffReport, left: Checkpoint, right: Checkpoint) -> None:
    mine, theirs = ({copy: name for name, copy in our_names(c.passthrough).items()} for c in (left, right))
    rings, bits = (Ring(), Ring()), VerifyReport()
    for copy in {**mine, **theirs}:
        if copy not in mine or copy not in theirs:
            report.notes.append(f"{copy}: only in {left.path if copy in mine else right.path}")
            continue
        outputs = [copy_of(c.tensors[names[copy]], names[copy], copy) for c, names in ((left, mine), (right, theirs))]
        compare_bits(bits, left, outputs[0], right, outputs[1], rings)
    copies_a, copies_b = output_layers(left, right)
    for name in copies_a:
        compare_bits(bits, left, copies_a[name], right, copies_b[name], rings)
    report.notes += bits.differences
