"""Activation checkpointing under a recipe: the recomputation must repeat the first run exactly.

It runs inside the backward pass, where the recipe's region has been left and delayed scaling has moved on. So the
first run notes the state and each module's live tensors, in order, and the recomputation reads them back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .autocast import put_in_force, recompute_contexts, state

if TYPE_CHECKING:
    from .quantized_module import LiveState

Saved = list[Any] | Callable[..., Any]
"""Which results selective checkpointing keeps: those of a list of operators, or as a policy function says."""
_NAMES = ("compute", "calibrating", "first_microbatch", "keep_kept", "statistics")


class FirstRun:
    """Notes what is in force, and the live state that each module gives out."""

    def __init__(self) -> None:
        self.values = {name: getattr(state(), name) for name in _NAMES}
        self.live: list[LiveState] = []

    def __enter__(self) -> Self:
        _RUNS.append((self, False))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _RUNS.pop()


class Recomputation:
    """Restores what the first run noted. No amax is recorded once more, and statistics go to a tensor that nobody
    reads: a layer that notes them takes its input another way, which shall be the same way again."""

    def __init__(self, first: FirstRun) -> None:
        self.first = first

    def __enter__(self) -> Self:
        s = state()
        self.previous = {name: getattr(s, name) for name in _NAMES}
        for name, value in self.first.values.items():
            setattr(s, name, value)
        put_in_force(s.compute)
        self.replay = iter([_without_record(live) for live in self.first.live])
        _RUNS.append((self, True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _RUNS.pop()
        for name, value in self.previous.items():
            setattr(state(), name, value)
        put_in_force(state().compute)


def _without_record(live: LiveState) -> LiveState:
    statistics = None if live.statistics is None else torch.empty_like(live.statistics)
    return live._replace(amax=None, statistics=statistics)


class _Both:
    """Two contexts, the second inside the first."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self.inner.__exit__(*exc_info)
        self.outer.__exit__(*exc_info)


_RUNS: list[tuple[FirstRun | Recomputation, bool]] = []


def contexts(save: Saved | None) -> tuple[Any, Any]:
    """Return `recompute_contexts`."""
    if TracingContext.try_get() is not None:
        # in a graph the compiler recomputes what it traced: no state is looked up a second time
        return create_selective_checkpoint_contexts(save or [])
    first = FirstRun()
    if save is None:
        return first, Recomputation(first)
    keep, give_out = create_selective_checkpoint_contexts(save)
    return _Both(first, keep), _Both(Recomputation(first), give_out)


def recomputing() -> bool:
    """Whether the innermost checkpointed region is being recomputed."""
    return bool(_RUNS) and _RUNS[-1][1]


def same_as_first_run(live: LiveState) -> LiveState:
    """Return the live state that a module shall use now: the given one, or in a recomputation that of the first run."""
    if not _RUNS:
        return live
    run, _ = _RUNS[-1]
    if isinstance(run, Recomputation):
        return next(run.replay)
    run.live.append(live)
    return live


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
