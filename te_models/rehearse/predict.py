"""The loss gap of an assignment, predicted from measured parts.

Of a format f, alone on layer l, KL(l, f) nats per token are measured, and KL(all, f) with f on all layers. In percent
of the loss:

    forward(u, f)  = 100 KL(l, f) / loss, shared among the units u of l by what their noise does to the loss
    together(f)    = KL(all, f) / sum of KL(l, f), the interaction of layers
    backward(u, f) = what training runs lost beyond 100 KL(all, f) / loss, shared by the noise of weight gradients

An assignment that has f on units with the share s of all forward(u, f) is predicted to lose, for each f,
`s total (1 + (together - 1) s) + the sum of backward`. Runs that lose less than the KL lower the prediction only where
the KL is outside of their interval: of the two it is the sharper measurement.

Each format has a correction c(f), by which this is multiplied as far as the format is not on all layers, where runs
have measured it: `1 + (c(f) - 1) (1 - s)`. Before a run has f on a part of the layers, c(f) is 1 with the standard
error |together(f) - 1|, at least 0.25: how far layers are from adding up. Runs of assignments then estimate the
corrections of the formats that they have, by least squares, with their seeds' noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .effect import Interval, student
from .formats import FORMATS, HIGH
from .observe import Unit, unit_groups
from .search import Choices, Point, best_within, cheapest, front, undominated

_ROUNDS = 4
"""Searches with gaps that the one before corrected."""
_LEAST_ERROR = 0.25
"""The standard error of a format's correction before a run has it on a part of the layers, at least."""


@dataclass(frozen=True)
class Parts:
    """What is known of one format, in percent of the loss. forward, backward: of each unit; together: the interaction
    of layers; error: the relative standard error of the KL."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    together: float
    error: float

    def share(self, has: Sequence[bool]) -> float:
        """Return which part of what all units lose in the forward pass is lost by the units that have this format."""
        total = sum(self.forward)
        return sum(f for f, it in zip(self.forward, has, strict=True) if it) / total if total > 0 else float(all(has))

    def gap(self, has: Sequence[bool]) -> float:
        """Return what the units that have this format lose."""
        share = self.share(has)
        own = share * sum(self.forward)
        return own * (1 + (self.together - 1) * share) + sum(b for b, it in zip(self.backward, has, strict=True) if it)


class MeasuredRun(NamedTuple):
    """An assignment that was run. formats: of each unit; gaps: of each seed, in percent."""

    formats: tuple[str, ...]
    gaps: tuple[float, ...]


class _Corrections(NamedTuple):
    """By how much each format's gap differs from the sum of its parts: c(f) - 1 by format; covariance [F, F], float64,
    in the order of `excess`."""

    excess: dict[str, float]
    covariance: Tensor


@dataclass(frozen=True)
class Prediction:
    """A model of gaps: `parts` of each format; seeds: of which a new measured gap is the mean; runs: what was run."""

    units: list[Unit]
    parts: Mapping[str, Parts]
    seeds: int
    runs: tuple[MeasuredRun, ...] = ()

    def cost(self, formats: Sequence[str]) -> float:
        """Return the relative GEMM time of an assignment, bf16 = 1."""
        total = sum(unit.flops for unit in self.units)
        return sum(unit.flops * cost_of(name) for unit, name in zip(self.units, formats, strict=True)) / total

    def gap(self, formats: Sequence[str]) -> float:
        """Return the predicted gap of an assignment in percent."""
        return sum(gap * self._factor(name, share) for name, gap, share in self._lost(formats))

    def interval(self, formats: Sequence[str]) -> Interval:
        """Return the interval in which the mean gap over `seeds` new seeds lies with 95 %: the noise of these runs and
        of those that were measured, the error of the KL, and of the corrections."""
        spread, freedom = self._noise(formats)
        error = sum(gap * self.parts[name].error for name, gap, _ in self._lost(formats))
        parts, covariance = self._uncorrected(formats), self.corrections.covariance
        half = student(freedom) * math.hypot(spread * math.sqrt(2 / self.seeds), error)
        return Interval(self.gap(formats), math.hypot(half, 1.96 * math.sqrt(float(parts @ covariance @ parts))))

    def knowing(self, run: MeasuredRun) -> Prediction:
        """Return the prediction that knows one run more."""
        return replace(self, runs=(*self.runs, run))

    @cached_property
    def corrections(self) -> _Corrections:
        """What runs of a part of the layers say, each format by itself."""
        prior = [max(abs(part.together - 1), _LEAST_ERROR) ** -2 for part in self.parts.values()]
        precision = torch.tensor(prior, dtype=torch.float64, device="cpu").diag()
        sums = torch.zeros(len(prior), dtype=torch.float64, device="cpu")
        for run in self.runs:
            parts = self._uncorrected(run.formats)
            expected = sum(gap for _, gap, _ in self._lost(run.formats))
            variance = max(self._noise(run.formats)[0] ** 2 / len(run.gaps), 1e-12)
            precision += parts.outer(parts) / variance
            sums += parts * (statistics.fmean(run.gaps) - expected) / variance
        covariance = torch.linalg.inv(precision)
        return _Corrections(dict(zip(self.parts, (covariance @ sums).tolist(), strict=True)), covariance)

    def _lost(self, formats: Sequence[str]) -> list[tuple[str, float, float]]:
        """Return of each format in an assignment but bf16 (its name, what its parts lose, its share)."""
        has = {name: [name == used for used in formats] for name in self.parts if name in formats}
        return [(name, self.parts[name].gap(its), self.parts[name].share(its)) for name, its in has.items()]

    def _factor(self, name: str, share: float) -> float:
        return max(1 + self.corrections.excess[name] * (1 - share), 0.0)

    def _uncorrected(self, formats: Sequence[str]) -> Tensor:
        """Return [F]: what each format is predicted to lose, as far as its correction multiplies it."""
        found = {name: gap * (1 - share) for name, gap, share in self._lost(formats)}
        return torch.tensor([found.get(name, 0.0) for name in self.parts], dtype=torch.float64, device="cpu")

    def _noise(self, formats: Sequence[str]) -> tuple[float, int]:
        """Return the standard deviation of a seed's gap over the runs that have one of the formats, and its degrees of
        freedom; over all runs where none has."""
        alike = [run.gaps for run in self.runs if {*run.formats} & {*formats} - {HIGH}]
        gaps = alike or [run.gaps for run in self.runs]
        freedom = sum(len(values) - 1 for values in gaps)
        if freedom == 0:
            return 0.0, 1
        return math.sqrt(sum((len(v) - 1) * statistics.variance(v) for v in gaps) / freedom), freedom

    def points(self, names: Sequence[str]) -> list[Point]:
        """Return the front of assignments of these formats and bf16, with predicted gaps, cheapest first.

        Options of a recipe are those of [precision]'s own recipe: of formats with options an assignment has one at
        most. What was run takes part: a search adds up the gaps of units, and need not find that a format loses less
        everywhere than its units say.
        """
        simple = [name for name in names if not FORMATS[name].options]
        runs = [run.formats for run in self.runs if {*run.formats} <= {HIGH, *names}]
        found = [Point(self.cost(formats), self.gap(formats), formats) for formats in runs]
        for special in [name for name in names if FORMATS[name].options] or [None]:
            allowed = [HIGH, *simple, *([special] if special else [])]
            middle: Sequence[str] = (HIGH,) * len(self.units)
            for _ in range(_ROUNDS):
                raw = front(self._choices(allowed, middle))
                points = [Point(point.cost, self.gap(point.formats), point.formats) for point in raw]
                found += points
                middle = points[len(points) // 2].formats
        return undominated(found)

    def _choices(self, names: Sequence[str], near: Sequence[str]) -> Choices:
        """Return what each format costs and loses on each unit of an assignment near this one."""
        total = sum(unit.flops for unit in self.units)
        gaps = {HIGH: [0.0] * len(self.units)}
        for name, part in self.parts.items():
            share = part.share([name == used for used in near])
            joint, factor = max(1 + (part.together - 1) * share, 0.0), self._factor(name, share)
            gaps[name] = [factor * (joint * f + b) for f, b in zip(part.forward, part.backward, strict=True)]
        return [
            {name: (unit.flops * cost_of(name) / total, gaps[name][i]) for name in names}
            for i, unit in enumerate(self.units)
        ]


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
