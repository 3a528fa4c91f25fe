"""The loss gap of an assignment, predicted from measured parts.

Of a format f, alone on layer l, KL(l, f) nats per token are measured, and KL(all, f) with f on all layers. In percent
of the loss:

    forward(u, f)  = 100 KL(l, f) / loss, shared among the units u of l by what their noise does to the loss
    together(f)    = KL(all, f) / sum of KL(l, f), the interaction of layers
    backward(u, f) = what training runs lost beyond 100 KL(all, f) / loss, shared by the noise of weight gradients

An assignment that has f on units with the share s of all forward(u, f) is predicted to lose, for each f,
`s total (1 + (together - 1) s) + the sum of backward`. Runs that lose less than the KL lower the prediction only where
the KL is outside of their interval: of the two it is the sharper measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .effect import Interval, student
from .formats import FORMATS, HIGH
from .observe import Unit, unit_groups
from .search import Choices, Point, best_within, cheapest, front, undominated

_ROUNDS = 4
"""Searches with gaps that the one before corrected."""


@dataclass(frozen=True)
class Parts:
    """What is known of one format, in percent of the loss. forward, backward: of each unit; together: the interaction
    of layers; error: the relative standard error of the KL."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    together: float
    error: float

    def gap(self, has: Sequence[bool]) -> float:
        """Return what the units that have this format lose."""
        total = sum(self.forward)
        own = sum(f for f, it in zip(self.forward, has, strict=True) if it)
        share = own / total if total > 0 else 0.0
        return own * (1 + (self.together - 1) * share) + sum(b for b, it in zip(self.backward, has, strict=True) if it)


@dataclass(frozen=True)
class Prediction:
    """A model of gaps: `parts` of each format; factor: what measured assignments corrected it by; spread: the standard
    deviation of a seed's gap, with its degrees of freedom; seeds: of which a measured gap is the mean."""

    units: list[Unit]
    parts: Mapping[str, Parts]
    spread: float
    freedom: int
    seeds: int
    factor: float = 1.0

    def cost(self, formats: Sequence[str]) -> float:
        """Return the relative GEMM time of an assignment, bf16 = 1."""
        total = sum(unit.flops for unit in self.units)
        return sum(unit.flops * cost_of(name) for unit, name in zip(self.units, formats, strict=True)) / total

    def gap(self, formats: Sequence[str]) -> float:
        """Return the predicted gap of an assignment in percent."""
        parts = ((p, [name == used for used in formats]) for name, p in self.parts.items())
        return self.factor * sum(part.gap(has) for part, has in parts if any(has))

    def interval(self, formats: Sequence[str]) -> Interval:
        """Return the interval in which the mean gap over `seeds` new seeds lies with 95 %: the noise of a run, that of
        the runs that were measured, the error of the KL, and how far layers are from adding up."""
        gap, additive, error = self.gap(formats), 0.0, 0.0
        for name, part in self.parts.items():
            has = [name == used for used in formats]
            own = self.factor * part.gap(has)
            sums = zip(part.forward, part.backward, has, strict=True)
            additive += self.factor * sum(f + b for f, b, it in sums if it)
            error += own * part.error
        noise = self.spread * math.sqrt(2 / self.seeds)
        half = student(self.freedom) * math.sqrt(noise**2 + error**2)
        return Interval(gap, math.hypot(half, gap - additive))

    def points(self, names: Sequence[str]) -> list[Point]:
        """Return the front of assignments of these formats and bf16, with predicted gaps, cheapest first.

        Options of a recipe are those of [precision]'s own recipe: of formats with options an assignment has one at
        most.
        """
        simple = [name for name in names if not FORMATS[name].options]
        found: list[Point] = []
        for special in [name for name in names if FORMATS[name].options] or [None]:
            allowed = [HIGH, *simple, *([special] if special else [])]
            scale = dict.fromkeys(allowed, 1.0)
            for _ in range(_ROUNDS):
                raw = front(self._choices(allowed, scale))
                points = [Point(point.cost, self.gap(point.formats), point.formats) for point in raw]
                found += points
                middle = points[len(points) // 2].formats
                scale = {name: self._scale(name, middle) for name in allowed}
        return undominated(found)

    def _choices(self, names: Sequence[str], scale: Mapping[str, float]) -> Choices:
        total = sum(unit.flops for unit in self.units)
        found = []
        for i, unit in enumerate(self.units):
            options = {}
            for name in names:
                part = self.parts.get(name)
                gap = 0.0 if part is None else self.factor * (scale[name] * part.forward[i] + part.backward[i])
                options[name] = (unit.flops * cost_of(name) / total, gap)
            found.append(options)
        return found

    def _scale(self, name: str, formats: Sequence[str]) -> float:
        """Return what the forward part of a format is multiplied by where the assignment is near `formats`."""
        part = self.parts.get(name)
        if part is None or not sum(part.forward):
            return 1.0
        share = sum(f for f, used in zip(part.forward, formats, strict=True) if used == name) / sum(part.forward)
        return max(1 + (part.together - 1) * share, 0.0)


def cost_of(name: str) -> float:
    """Return the relative time of a GEMM in a format."""
    return 1.0 if name == HIGH else FORMATS[name].cost


def known_losses(
    units: list[Unit],
    divergence: Mapping[str, tuple[float, float]],
    whole: tuple[float, float],
    errors: Mapping[str, Mapping[str, float]],
    gap: Interval | None,
    loss: float,
) -> Parts:
    """Return what is known of a format.

    divergence: of measured groups, by name, (KL, its standard error); others lie between their neighbours. whole: of
    all layers. errors: "fisher" and "dw.noise" of measured units, by name. gap: of training runs, in percent; None:
    there were none. loss: in nats per token.
    """
    groups = unit_groups(units)
    filled = dict(zip(groups, interpolated([divergence.get(g, (None, 0.0))[0] for g in groups]), strict=True))
    fisher, noise = (spread_over_units(units, errors, key) for key in ("fisher", "dw.noise"))
    forward = []
    for i, unit in enumerate(units):
        own = sum(f for f, other in zip(fisher, units, strict=True) if other.group == unit.group)
        count = sum(other.group == unit.group for other in units)
        forward.append(100 * filled[unit.group] / loss * (fisher[i] / own if own > 0 else 1 / count))
    total, joint = sum(forward), 100 * whole[0] / loss
    together = joint / total if total > 0 else 1.0
    rest = 0.0 if gap is None else max(gap.mean - joint, 0.0)
    factor = max(gap.mean, 0.0) / joint if gap is not None and gap.high < joint else 1.0
    weighted = [n * unit.flops for n, unit in zip(noise, units, strict=True)]
    backward = [rest * w / sum(weighted) if sum(weighted) > 0 else rest / len(units) for w in weighted]
    error = whole[1] / whole[0] if whole[0] > 0 else 0.0
    return Parts(tuple(factor * f for f in forward), tuple(backward), together, error)


def interpolated(values: Sequence[float | None]) -> list[float]:
    """Return values with the missing ones on a line between their neighbours, or as the nearest one."""
    known = [(i, max(value, 0.0)) for i, value in enumerate(values) if value is not None]
    found = []
    for i in range(len(values)):
        before = max((k for k in known if k[0] <= i), default=known[0])
        behind = min((k for k in known if k[0] >= i), default=known[-1])
        part = 0.0 if behind[0] == before[0] else (i - before[0]) / (behind[0] - before[0])
        found.append(before[1] + part * (behind[1] - before[1]))
    return found


def spread_over_units(units: list[Unit], errors: Mapping[str, Mapping[str, float]], key: str) -> list[float]:
    """Return a number of each unit: its own, or that of the nearest measured unit of its kind, or the mean."""
    measured = {i: errors[unit.name][key] for i, unit in enumerate(units) if unit.name in errors}
    mean = statistics.fmean(measured.values()) if measured else 1.0
    found = []
    for i, unit in enumerate(units):
        alike = [j for j in measured if units[j].kind == unit.kind]
        found.append(measured[min(alike, key=lambda j: abs(j - i))] if alike else mean)
    return found


def cheapest_assignment(prediction: Prediction, names: Sequence[str], budget: float) -> Point:
    """Return the cheapest assignment that is predicted to lose at most `budget` percent; bf16 everywhere at worst."""
    found = cheapest(prediction.points(names), budget)
    high = (HIGH,) * len(prediction.units)
    return found or Point(1.0, 0.0, high)


def equal_cost(prediction: Prediction, names: Sequence[str], cost: float) -> Point | None:
    """Return the assignment that is predicted to lose least at no more than this cost."""
    return best_within(prediction.points(names), cost)
