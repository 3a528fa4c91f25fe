"""What is in force in this thread, and the regions that say so: `autocast` and the other context managers.

Each thread has its separate state; a new one starts with nothing in force, as under `torch.amp.autocast`. A graph reads
it as one attribute of a `threading.local`, the only one that any traced code reads: the compiler then guards on the
fields of what is in force in the thread that calls (torch 2.11 to 2.15), so that one graph serves all threads and an
equal recipe re-created for the next step costs nothing. It does not trace a ContextVar.

A backward pass runs in threads of autograd, so no backward pass reads this: what it needs, the forward pass hands over.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from .base import Recipe

if TYPE_CHECKING:
    import torch.distributed as dist

    from .activation_checkpoint import FirstRun, Replay


class RecipeContext:
    """What the regions of one thread say. compute, storage: None is high precision. chosen: whether the live modules
    know what `compute` means for them, see `recipe_use`. by_region: whether the region that says so was entered outside
    of compiled code. touched: in a region opened inside a compiled function, the
    modules that recorded amaxes; None elsewhere, where all live modules are asked. depth: how many `autocast` regions
    are open. entered: the regions entered outside of compiled code and not yet left. runs: the activation checkpoints
    that are being run or recomputed, the innermost last."""

    def __init__(self) -> None:
        self.compute: Recipe | None = None
        self.chosen = self.by_region = False
        self.storage: Recipe | None = None
        self.preserve_init_val = False
        self.calibrating = False
        self.amax_reduction_group: dist.ProcessGroup | None = None
        self.first_microbatch: bool | None = None
        self.noop: Tensor | None = None
        self.statistics = False
        self.depth = 0
        self.touched: list[Any] | None = None
        self.entered: list[RegionEntry] = []
        self.runs: list[FirstRun | Replay] = []


class _OfThread(threading.local):
    """now: the state of the thread that reads it."""

    def __init__(self) -> None:
        self.now = RecipeContext()


THREAD = _OfThread()
"""`THREAD.now` is `state()` without the call."""


def state() -> RecipeContext:
    """Return what is in force now in this thread; only the regions write to it."""
    return THREAD.now


class RegionEntry:
    """One entry of a region: whose state it changed, and what was in force there before, by attribute."""

    def __init__(self, of: RecipeContext, before: dict[str, Any]) -> None:
        self.of, self.before, self.listed = of, before, False


class Region:
    """A context manager that sets attributes of the state and gives them back.

    Regions may be left in another order than they were entered (generators, tasks of an event loop): what is in force
    is always what the innermost of those still open says. One object may be entered again, and in several threads.
    """

    def __init__(self, **values: Any) -> None:
        self._values = values
        self._entries: list[RegionEntry] = []  # one for each time that it is entered and not yet left

    def __enter__(self) -> Self:
        self._enter(self._values)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo(self._last_entry())

    def _enter(self, values: dict[str, Any]) -> None:
        s = state()
        entry = RegionEntry(s, {name: getattr(s, name) for name in values})
        for name, value in values.items():
            setattr(s, name, value)
        if not (
            torch.compiler.is_compiling() and compiling()
        ):  # in a graph, regions nest as its code does; and it would be guarded on the list
            entry.listed = True
            s.entered.append(entry)
        self._entries.append(entry)

    def _last_entry(self) -> RegionEntry:
        """Return this thread's last entry, or the last of any where this thread has none, and forget it."""
        if not (torch.compiler.is_compiling() and compiling()):
            for entry in reversed(self._entries.copy()):  # other threads enter and leave meanwhile: no index holds
                if entry.of is state():
                    self._entries.remove(entry)
                    return entry
        return self._entries.pop()

    def _undo(self, entry: RegionEntry) -> None:
        """Give back what the state was before an entry."""
        entered = entry.of.entered if entry.listed else []
        later = entered[entered.index(entry) + 1 :] if entry.listed else []
        for name, value in entry.before.items():
            # what was before this region was before the next one that is still open, too, or else is in force again
            next_one = next((other for other in later if name in other.before), None) if later else None
            if next_one is None:
                setattr(entry.of, name, value)
            else:
                next_one.before[name] = value
        if entry.listed:
            entered.remove(entry)
