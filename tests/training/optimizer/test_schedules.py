"""Learning-rate schedules against their definitions."""

import math

import pytest

from te_models.config import ConfigError
from te_models.training import ScheduleConfig, lr_at


def values(steps: int, **schedule: object) -> list[float]:
    config = ScheduleConfig.from_dict(schedule)
    return [lr_at(step, peak=2.0, steps=steps, schedule=config) for step in range(steps)]


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    for kind in ("constant", "linear", "cosine", "inverse_sqrt", "wsd"):
        assert values(20, kind=kind, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_constant_stays() -> None:
    assert set(values(10, kind="constant")) == {2.0}


def test_cosine_follows_its_formula_and_ends_at_the_floor() -> None:
    got = values(101, kind="cosine", min_lr_ratio=0.25)
    expected = [0.5 + 1.5 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(101)]
    assert got == pytest.approx(expected, rel=1e-12) and got[-1] == pytest.approx(0.5)


def test_wsd_is_flat_then_linear() -> None:
    got = values(30, kind="wsd", warmup_steps=5, decay_steps=10, min_lr_ratio=0.0)
    assert got[4:20] == [2.0] * 16 and got[20:] == pytest.approx([2.0 * (1 - i / 10) for i in range(1, 11)])


def test_wsd_can_fall_as_one_minus_the_root() -> None:
    got = values(30, kind="wsd", decay_steps=10, min_lr_ratio=0.0, lr_wsd_decay_style="minus_sqrt")
    assert got[20:] == pytest.approx([2.0 * (1 - math.sqrt(i / 10)) for i in range(1, 11)])
    with pytest.raises(ConfigError, match=r"lr_wsd_decay_style is 'minus_sqrt'; allowed: 'linear' unless"):
        ScheduleConfig(kind="cosine", lr_wsd_decay_style="minus_sqrt")


def test_linear_ends_at_the_floor() -> None:
    got = values(13, kind="linear", warmup_steps=2, min_lr_ratio=0.25)
    assert got[2:] == pytest.approx([2.0 * (1 - 0.75 * i / 10) for i in range(11)])


def test_inverse_sqrt_goes_on_from_the_warmup() -> None:
    got = values(400, kind="inverse_sqrt", warmup_steps=16, min_lr_ratio=0.25)
    assert got[15] == 2.0 and got[63] == pytest.approx(1.0)
    assert got[-1] == 0.5


def test_wsd_decays_over_a_tenth_by_default() -> None:
    got = values(100, kind="wsd", min_lr_ratio=0.0)
    assert got[89] == 2.0 and got[90] == pytest.approx(1.8)
    assert got[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_shortest_runs_stay_between_floor_and_peak(kind: str, steps: int, warmup: int) -> None:
    got = values(steps, kind=kind, warmup_steps=warmup)
    assert all(0.2 - 1e-12 <= lr <= 2.0 for lr in got)
