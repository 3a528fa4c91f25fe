"""Callbacks: others' code that is told of a run's steps, rows, checkpoints, evaluations and end.

A callback that raises ends the run, and loses nothing of it: the step that it was told of is saved first. On several
ranks each rank has its own callbacks, and one may raise on one rank alone; all of them then save, and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...config import ConfigError
from ...model import GPTModel
from ..config import TrainConfig
from ..ranks.data_parallel import Ranks, largest_over_ranks
from ..step import TrainingError
from .installed import load_installed

if TYPE_CHECKING:
    from ..loop import TrainResult


class CallbackError(TrainingError):
    """A callback raised; the message names it, the event, the step, and what it raised (the cause)."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What a callback sees of a run, after `step` of its steps.

    Attributes:
        config: The configuration of the run.
        output_dir: Its folder.
        step: How many steps have finished.
        model: The model, or this rank's part of it; the values are not to be changed.
        rank: The number of this process among `ranks`; 0 writes files and metrics.
    """

    config: TrainConfig
    output_dir: Path
    step: int
    model: GPTModel
    rank: int = 0
    ranks: int = 1


class Callback:
    """Base of the callbacks of `train`; each method does nothing until a subclass says otherwise.

    Every rank calls every method, `on_log` excepted, in the order of the callbacks. What a method raises ends the run
    with a `CallbackError`, behind a checkpoint of the step.

    Example:
        class StopAt(Callback):
            def on_step(self, run, loss):
                if loss < 1.0:
                    raise RuntimeError("that is enough")

        train(config, callbacks=[StopAt()])
    """

    def on_begin(self, run: RunView) -> None:
        """The run begins, or continues, behind `run.step` steps."""

    def on_step(self, run: RunView, loss: float) -> None:
        """A step has finished. loss: the mean over its predictions, on all ranks."""

    def on_evaluate(self, run: RunView, numbers: Mapping[str, float]) -> None:
        """The model was evaluated. numbers: "validation_loss", "validation_loss/SET" of `evaluation.sets`, and those of
        evaluations by others' code, under the names that the metrics have."""

    def on_log(self, run: RunView, row: Mapping[str, Any]) -> None:
        """The row of a step was written to the metrics; rank 0 alone."""

    def on_save(self, run: RunView, checkpoint: Path) -> None:
        """A checkpoint was written, or with `checkpoint.async_save` begun."""

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """The run is complete: the model is in `result.model_dir`."""


class Callbacks:
    """The callbacks of a run, called together. named: by the names that errors have."""

    def __init__(self, named: Sequence[tuple[str, Callback]], ranks: Ranks) -> None:
        self._named, self._ranks = named, ranks
        self.failed: CallbackError | None = None
        """The first error of a callback on this rank; `check` raises it."""

    @classmethod
    def of(cls, names: Iterable[str], callbacks: Iterable[Callback], ranks: Ranks) -> Callbacks:
        """Return the callbacks that a configuration names, then those that are given.

        A name means a `Callback`, or a class or function without arguments that returns one. Raises ConfigError for
        another object, and for a name that is not installed; CallbackError for one that cannot be made."""
        named = []
        for name in names:
            found = load_installed(name, "callbacks")
            if callable(found) and not isinstance(found, Callback):
                try:
                    found = found()
                except Exception as error:
                    raise CallbackError(f"the callback {name} cannot be made: {_said(error)}") from error
            if not isinstance(found, Callback):
                raise ConfigError(
                    f"callbacks has {name!r}, which is a {type(found).__name__}; allowed: a te_models.training.Callback"
                    ", or a class or function without arguments that returns one"
                )
            named.append((name, found))
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks has a {type(callback).__name__}; allowed: te_models.training.Callback")
            named.append((f"{type(callback).__module__}:{type(callback).__qualname__}", callback))
        return cls(named, ranks)

    def tell(self, event: str, run: RunView, *values: Any) -> None:
        """Call the method `event` of each callback; the first that raises is the last that is called, and `failed`."""
        for name, callback in self._named if self.failed is None else ():
            method = partial(getattr(callback, event), run, *values)
            self.guarded(f"the callback {name} failed in {event}", run, method)

    def guarded(self, what: str, run: RunView, function: Callable[[], Any]) -> Any:
        """Return what others' code returns; None where it raised, or something else did before."""
        if self.failed is not None:
            return None
        try:
            return function()
        except Exception as error:
            self.failed = CallbackError(f"{what} at step {run.step}: {_said(error)}")
            self.failed.__cause__ = error
            return None

    def check(self, where: str) -> None:
        """Raise CallbackError on every rank where a callback failed on one; called by all. where: what is saved."""
        if not self._named and self.failed is None and self._ranks.world_size == 1:
            return
        failed = largest_over_ranks(torch.tensor([self.failed is not None], device="cpu").long(), self._ranks)
        if int(failed):
            raise self.error(where)

    def error(self, where: str) -> CallbackError:
        """Return the error that ends the run on this rank. where: what is saved, a clause."""
        if self.failed is None:
            return CallbackError(f"a callback failed on another rank; {where}")
        found = CallbackError(f"{self.failed}; {where}")
        found.__cause__ = self.failed.__cause__
        return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
