"""Activation checkpointing under a recipe: the recomputation must repeat the first run exactly.

It runs inside the backward pass, where the recipe's region has been left and delayed scaling has moved on. So the
first run notes the state and each module's scale and key, in order, and the recomputation reads them back.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from .autocast import state

_NAMES = ("compute", "calibrating", "first_microbatch", "keep_kept", "statistics")


class FirstRun:
    """Notes what is in force, and what `same_as_first_run` gives out."""

    def __init__(self) -> None:
        self.values = {name: getattr(state(), name) for name in _NAMES}
        self.live: list[tuple[Tensor | None, Tensor | None]] = []

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
        self.replay = iter(self.first.live)
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


def same_as_first_run(scale: Tensor | None, key: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the scale and the rounding key that a module shall use now: the given ones, or in a recomputation those
    of the first run."""
    if not _RUNS:
        return scale, key
    run, _ = _RUNS[-1]
    if isinstance(run, Recomputation):
        return next(run.replay)
    run.live.append((scale, key))
    return scale, key
