"""What a row of the metrics is to a dashboard: scalars by name, and histograms of experts and quantized operands."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

BINS = 30
LOGARITHMIC = ("amax", "scale_min", "scale_max")
"""Statistics of quantized operands whose histograms are over log2, because they span many powers of two."""


class Histogram(NamedTuple):
    """counts: how many values lie in each bin; edges: one more number, the borders of the bins."""

    counts: list[float]
    edges: list[float]


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name. Names in a layer of experts end with its place among them
    ("experts/max_load/0"); of quantized operands there is the largest amax, underflow and saturation of each role."""
    found = dict(_numbers({name: v for name, v in row.items() if name not in ("step", "expert_tokens")}, ""))
    for role, statistics in _by_role(row).items():
        for name in ("amax", "underflow", "saturation"):
            if statistics[name]:
                found[f"quantization/{role}/{name}"] = max(statistics[name])
    return found


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key != "quantization":
                yield from _numbers(part, f"{name}/{key}" if name else key)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _numbers(part, f"{name}/{i}")
    elif isinstance(value, (bool, int, float)):
        yield name, float(value)


def histograms_of(row: dict[str, Any]) -> dict[str, Histogram]:
    """Return the histograms of a row that has what they are made of: of each layer of experts the tokens of each expert
    (a bin is an expert), and of each role of quantized operands how each statistic is spread over the layers."""
    found = {
        f"expert_tokens/{i}": Histogram([float(count) for count in counts], [e - 0.5 for e in range(len(counts) + 1)])
        for i, counts in enumerate(row.get("expert_tokens", ()))
    }
    for role, statistics in _by_role(row).items():
        for name, values in statistics.items():
            if name in LOGARITHMIC:
                name, values = f"log2_{name}", [math.log2(v) for v in values if v > 0]
            if values:
                found[f"quantization/{role}/{name}"] = histogram(values)
    return found


def histogram(values: list[float]) -> Histogram:
    """Return how finite values, at least one, are spread between the least and the greatest of them."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, edges = torch.histogram(torch.tensor(values, dtype=torch.float64, device="cpu"), BINS, range=(low, high))
    return Histogram(counts.tolist(), edges.tolist())


def _by_role(row: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the finite statistics of all layers, by role and by name."""
    found: dict[str, dict[str, list[float]]] = {}
    for operand, statistics in row.get("quantization", {}).items():
        role = operand.rpartition(".")[2]
        for name, value in statistics.items():
            found.setdefault(role, {}).setdefault(name, []).extend([] if value is None else [value])
    return found
