"""The learning-rate curve of a run, and which one a run follows that continues with another configuration.

The learning rate is a function of the step and the configuration, so another `steps` is another curve, also for the
steps that were trained already. A run goes on without a word only where both curves agree in all of those: it is then,
bit for bit, a run that had the new configuration from its first step. A constant rate always agrees, "wsd" before its
decay begins, a cosine never.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import ConfigError
from ..config import ScheduleConfig, TrainConfig
from .schedule import lr_at


@dataclass(frozen=True)
class LearningRate:
    """A curve: its peak, its length in steps, its shape."""

    peak: float
    steps: int
    schedule: ScheduleConfig

    @classmethod
    def of(cls, config: TrainConfig) -> LearningRate:
        """Return the curve that a configuration describes."""
        return cls(config.optimizer.lr, config.schedule.steps or config.steps, config.schedule)

    def at(self, step: int) -> float:
        """Return the learning rate of step number `step` (from 0)."""
        return lr_at(step, peak=self.peak, steps=self.steps, schedule=self.schedule)


def continued_config(config: TrainConfig, before: Mapping[str, Any], step: int) -> TrainConfig:
    """Return the configuration of a run that continues: `config`, with the curve that `schedule.extend` asks for.

    Args:
        before: The configuration in the checkpoint, as a dictionary.
        step: How many steps the checkpoint has finished.

    Raises:
        ConfigError: the curves differ in a finished step and `schedule.extend` does not say which one is meant, or
            fewer steps are asked for than are finished.
    """
    if config.steps < step:
        raise ConfigError(f"steps is {config.steps}; allowed: at least the {step} that the checkpoint has finished")
    extend = config.schedule.extend
    if extend == "replace":
        return config
    schedule = ScheduleConfig.from_dict(dict(before["schedule"]))
    old = LearningRate(before["optimizer"]["lr"], schedule.steps or before["steps"], schedule)
    new = LearningRate.of(config)
    if extend == "hold":
        held = new if config.schedule.steps else dataclasses.replace(new, steps=old.steps)
        if changes := _changes(old, held):
            raise ConfigError(
                f"cannot continue from step {step}: {', '.join(changes)} differ from the checkpoint's; allowed with "
                "schedule.extend = 'hold': another steps only"
            )
        return config.replace(schedule=config.schedule.replace(steps=old.steps))
    changes = _changes(old, new)
    differing = next((s for s in range(step) if old.at(s) != new.at(s)), None) if changes else None
    if differing is not None:
        raise ConfigError(
            f"cannot continue from step {step}: {', '.join(changes)} differ from the checkpoint's, and with them the "
            f"learning rate, {old.at(differing):.3g} at step {differing + 1} and now {new.at(differing):.3g}; allowed: "
            "schedule.extend = 'hold', to stay at the end of the checkpoint's curve, or 'replace', to take the new one"
        )
    return config


def _changes(old: LearningRate, new: LearningRate) -> list[str]:
    """Return the names of the keys that make two curves different."""
    names = ["optimizer.lr"] if old.peak != new.peak else []
    names += ["schedule.steps" if new.schedule.steps else "steps"] if old.steps != new.steps else []
    before, now = old.schedule.to_dict(), new.schedule.to_dict()
    return names + [f"schedule.{key}" for key in now if now[key] != before[key] and key not in ("steps", "extend")]
