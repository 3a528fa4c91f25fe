"""Learning-rate schedules against their definitions."""

import math
from collections.abc import Callable

import pytest

from te_models.config import ConfigError
from te_models.training import ScheduleConfig, lr_at


def values(steps: int, **schedule: object) -> list[float]:
    config = ScheduleConfig.from_dict(schedule)
    return [lr_at(step, peak=2.0, steps=steps, schedule=config) for step in range(steps)]


KINDS = ["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
FORMULAS = [
    ({"kind": "constant"}, range(10), lambda step: 2.0),
    ({"kind": "cosine"}, range(101), lambda step: 0.5 + 1.5 * (1 + math.cos(math.pi * step / 100)) / 2),
    ({"kind": "linear", "warmup_steps": 2}, range(2, 13), lambda step: 2.0 * (1 - 0.75 * (step - 2) / 10)),
    ({"kind": "inverse_sqrt", "warmup_steps": 16}, range(15, 400), lambda step: max(0.5, 8 / math.sqrt(step + 1))),
]
FALLING = [  # to zero, over a tenth of the steps by default
    ({"warmup_steps": 5, "decay_steps": 10}, range(4, 30), lambda step: 2.0 * min(1, 1 - (step - 19) / 10)),
    ({"lr_wsd_decay_style": "minus_sqrt", "decay_steps": 10}, range(20, 30), lambda s: 2 - 2 * ((s - 19) / 10) ** 0.5),
    ({}, range(100), lambda step: 2.0 * min(1, 1 - (step - 89) / 10)),
]
FORMULAS += [({"kind": "wsd", "min_lr_ratio": 0.0} | schedule, *rest) for schedule, *rest in FALLING]


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_is_linear_and_reaches_the_peak(kind: str) -> None:
    assert values(20, kind=kind, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(("schedule", "steps", "formula"), FORMULAS)
def test_rates_follow_their_formula(schedule: dict, steps: range, formula: Callable[[int], float]) -> None:
    found = values(steps.stop, **{"min_lr_ratio": 0.25, **schedule})[steps.start :]
    assert found == pytest.approx([formula(step) for step in steps], rel=1e-12, abs=1e-12)


def test_only_wsd_has_a_style_of_decay() -> None:
    with pytest.raises(ConfigError, match=r"lr_wsd_decay_style is 'minus_sqrt'; allowed: 'linear' unless"):
        ScheduleConfig(kind="cosine", lr_wsd_decay_style="minus_sqrt")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_shortest_runs_stay_between_floor_and_peak(kind: str, steps: int, warmup: int) -> None:
    got = values(steps, kind=kind, warmup_steps=warmup)
    assert all(0.2 - 1e-12 <= lr <= 2.0 for lr in got)
