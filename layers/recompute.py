"""Activation checkpointing under a recipe: the recomputation must repeat the first run exactly.

It runs inside the backward pass, where the recipe's region has been left and delayed scaling has moved on. So the
first run notes the state and each module's scale, in order, and the recomputation reads them back.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from .autocast import state

_NAMES = ("compute", "calibrating", "first_microbatch", "statistics")


class FirstRun:
    """Notes what is in force, and the scales that `scale_for_run` gives out."""

    def __init__(self) -> None:
        self.values = {name: getattr(state(), name) for name in _NAMES}
        self.scales: list[Tensor] = []

    def __enter__(self) -> Self:
        _RUNS.append((self, False))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _RUNS.pop()


class Recomputation:
    """Restores what the first run noted."""

    def __init__(self, first: FirstRun) -> None:
        self.first = first

    def __enter__(self) -> Self:
        s = state()
        self.previous = {name: getattr(s, name) for name in _NAMES}
        for name, value in self.first.values.items():
            setattr(s, name, value)
        s.statistics = False
        self.replay = iter(self.first.scales)
        _RUNS.append((self, True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _RUNS.pop()
        for name, value in self.previous.items():
            setattr(state(), name, value)


_RUNS: list[tuple[FirstRun | Recomputation, bool]] = []


def recomputing() -> bool:
    """Whether the innermost checkpointed region is being recomputed."""
    return bool(_RUNS) and _RUNS[-1][1]


def scale_for_run(scale: Tensor) -> Tensor:
    """Return the scale a delayed-scaling module shall use now: its own, or in a recomputation that of the first run."""
    if not _RUNS:
        return scale
    run, _ = _RUNS[-1]
    if isinstance(run, Recomputation):
        return next(run.replay)
    run.scales.append(scale)
    return scale
