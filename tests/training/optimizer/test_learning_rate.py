"""A run that continues follows the learning-rate curve that it began with, or the one that it is told to follow."""

from pathlib import Path

import pytest

from te_models.config import ConfigError
from te_models.training import OptimizerConfig, ScheduleConfig, TrainConfig, train
from te_models.training.optimizer.learning_rate import LearningRate, continued_config
from tests.compare import refused
from tests.training.runs import curve, tiny_run


def run(tmp_path: Path, steps: int = 10, lr: float = 1.0, **schedule: object) -> TrainConfig:
    return tiny_run(tmp_path, steps=steps, optimizer=OptimizerConfig(lr=lr), schedule=ScheduleConfig(**schedule))


def rates(config: TrainConfig, steps: range) -> list[float]:
    return [LearningRate.of(config).at(step) for step in steps]


@pytest.mark.parametrize("step", [4, 10])
def test_a_cosine_of_another_length_is_refused(tmp_path: Path, step: int) -> None:
    before = run(tmp_path).to_dict()
    with pytest.raises(ConfigError, match=rf"step {step}: steps differ .* learning rate, 0.973 at step 2 and now 0.9"):
        continued_config(run(tmp_path, 20), before, step)
    with pytest.raises(ConfigError, match=r"schedule.steps differ .* allowed: schedule.extend = 'hold', .* 'replace'"):
        continued_config(run(tmp_path).replace(schedule=ScheduleConfig(steps=20)), before, step)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("schedule.kind", {"kind": "constant"}),
        ("schedule.warmup_steps", {"warmup_steps": 2}),
        ("schedule.min_lr_ratio", {"min_lr_ratio": 0.5}),
        ("optimizer.lr", {"lr": 0.5}),
    ],
)
def test_what_else_shapes_the_curve_is_refused(tmp_path: Path, name: str, change: dict[str, object]) -> None:
    before = run(tmp_path).to_dict()
    with pytest.raises(ConfigError, match=f"from step 5: {name} differ from the checkpoint's, and with them the"):
        continued_config(run(tmp_path, **change), before, 5)
    assert continued_config(run(tmp_path, extend="replace", **change), before, 5)
    with pytest.raises(ConfigError, match=f"{name} differ .* with schedule.extend = 'hold': another steps only"):
        continued_config(run(tmp_path, extend="hold", **change), before, 5)


def test_curves_that_agree_in_what_was_trained_need_no_word(tmp_path: Path) -> None:
    constant = run(tmp_path, kind="constant", warmup_steps=3)
    assert continued_config(constant.replace(steps=50), constant.to_dict(), 10).steps == 50
    wsd = run(tmp_path, kind="wsd", decay_steps=4)
    longer = wsd.replace(steps=20)
    assert continued_config(longer, wsd.to_dict(), 6) is longer
    refused(lambda: continued_config(longer, wsd.to_dict(), 8), "steps differ", error=ConfigError)


def test_fewer_steps_than_are_finished_are_refused(tmp_path: Path) -> None:
    config = run(tmp_path, kind="constant")
    with pytest.raises(ConfigError, match="steps is 10; allowed: at least the 12 that the checkpoint has finished"):
        continued_config(config, config.to_dict(), 12)


def test_extending_a_finished_run_is_said(tmp_path: Path) -> None:
    """Holding stays at the end of the old curve, replacing goes over to the new one; both can be repeated."""
    old = tiny_run(tmp_path, steps=2)
    train(old)
    refused(lambda: train(old.replace(steps=4)), "cannot continue from step 2: steps differ", error=ConfigError)
    seen = [row[3] for row in curve(old)]
    for steps in (3, 4):
        train(old.replace(steps=steps, schedule=ScheduleConfig(extend="hold")))
    assert [row[3] for row in curve(old)] == [*seen, seen[-1], seen[-1]]
    new = old.replace(steps=6, schedule=ScheduleConfig(extend="replace"))
    train(new)
    assert [row[3] for row in curve(old)][4:] == rates(new, range(4, 6))
    train(new.replace(schedule=ScheduleConfig()))  # the checkpoint's curve is the new one now
