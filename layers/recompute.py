"""Activation checkpointing under a recipe: the recomputation must repeat the first run exactly.

It runs inside the backward pass, where the recipe's region has been left and delayed scaling has moved on. So the
first run notes the state and each module's scale and key, in order, and the recomputation reads them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .autocast import put_in_force, recompute_contexts, state

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
        put_in_force(s.compute)
        s.statistics = False
        self.replay = iter(self.first.live)
        _RUNS.append((self, True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _RUNS.pop()
        for name, value in self.previous.items():
            setattr(state(), name, value)
        put_in_force(state().compute)


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


def refuse_around_a_graph() -> None:
    """Raise RuntimeError where a compiled layer with live state is called inside an activation checkpoint that is not
    compiled: a graph notes nothing for the recomputation, which would read later scales or draw other bits."""
    if _RUNS:
        raise RuntimeError(
            "a layer compiled under delayed scaling or stochastic rounding was called inside an eager activation "
            "checkpoint; compile the function that calls checkpoint"
        )


def checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, keeping only the arguments for the backward pass, in which it runs again."""
    # in a graph the compiler recomputes what it traced: no state is looked up a second time
    contexts: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": recompute_contexts}
    return checkpoint(function, *arguments, use_reentrant=False, **contexts)
