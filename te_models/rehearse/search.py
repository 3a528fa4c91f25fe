"""The cheapest assignment of formats to layers: a multiple-choice knapsack, solved exactly where it is small.

Each unit (a layer with GEMMs) has one format. Costs add up, and so do loss gaps; what formats do together beyond that
is put in by the caller, who searches again with other gaps (`predict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

MOST = 1500
"""Points of a front that are carried from unit to unit; of more, one for each of as many equal spans of cost."""

Choices = Sequence[Mapping[str, tuple[float, float]]]
"""Of each unit, by the names of its formats: (cost, gap)."""


class Point(NamedTuple):
    """An assignment: a format for each unit."""

    cost: float
    gap: float
    formats: tuple[str, ...]


class _State(NamedTuple):
    cost: float
    gap: float
    format: str
    before: _State | None


_P = TypeVar("_P", Point, _State)


def front(choices: Choices) -> list[Point]:
    """Return the assignments that no other beats in both cost and gap, cheapest first.

    Exact while fronts have at most MOST points; beyond that a point may cost up to 1 / MOST of the range of costs more
    than the best one. Raises ValueError for a unit without a format.
    """
    states = [_State(0.0, 0.0, "", None)]
    for number, options in enumerate(choices):
        if not options:
            raise ValueError(f"unit {number} has no format to choose; allowed: one or more")
        found = [
            _State(state.cost + cost, state.gap + gap, name, state)
            for state in states
            for name, (cost, gap) in options.items()
        ]
        states = _thinned(undominated(found))
    return [Point(state.cost, state.gap, _formats(state)) for state in states]


def cheapest(points: Sequence[Point], budget: float) -> Point | None:
    """Return the cheapest point whose gap is at most `budget`; None without such a point."""
    fitting = [point for point in points if point.gap <= budget]
    return min(fitting, key=lambda point: (point.cost, point.gap)) if fitting else None


def best_within(points: Sequence[Point], cost: float) -> Point | None:
    """Return the point with the smallest gap whose cost is at most `cost`; None without such a point."""
    fitting = [point for point in points if point.cost <= cost * (1 + 1e-9)]
    return min(fitting, key=lambda point: (point.gap, point.cost)) if fitting else None


def undominated(points: Iterable[_P]) -> list[_P]:
    """Return the points, or states, that no other beats in both cost and gap, cheapest first."""
    found: list[_P] = []
    for point in sorted(points, key=lambda point: (point.cost, point.gap)):
        if not found or point.gap < found[-1].gap:
            found.append(point)
    return found


def _thinned(states: list[_State]) -> list[_State]:
    """Return at most MOST of the states: of each span of cost the last one, whose gap is the smallest."""
    if len(states) <= MOST:
        return states
    low, high = states[0].cost, states[-1].cost
    spans = {int((MOST - 3) * (state.cost - low) / (high - low)): state for state in states[1:-1]}
    return [states[0], *spans.values(), states[-1]]


def _formats(state: _State) -> tuple[str, ...]:
    found = []
    while state.before is not None:
        found.append(state.format)
        state = state.before
    return tuple(reversed(found))
