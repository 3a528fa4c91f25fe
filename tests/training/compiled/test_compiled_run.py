"""Compiled runs: one graph for the whole run, the same numbers as eager within rounding, and bitwise resume."""

from pathlib import Path

import pytest
from torch._dynamo.utils import counters

import te_models.training as training
from tests.training.child import run_until_killed
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_model, tiny_run

RECIPES = ("none", "current", "block", "mxfp8")


def compiled_run(tmp_path: Path, recipe: str, moe: bool) -> training.TrainConfig:
    precision = training.PrecisionConfig(dtype="bf16", recipe=recipe)
    run = tiny_run(tmp_path, "compiled", steps=4, compile=True, precision=precision)
    return run.replace(
        model=training.ModelSource(config=tiny_model(moe=moe, layers=1)),
        schedule=training.ScheduleConfig(kind="cosine", warmup_steps=2),
        optimizer=training.OptimizerConfig(lr=1e-3),
        checkpoint=training.CheckpointConfig(every=2),
    )


def assert_near_eager(config: training.TrainConfig, tmp_path: Path, recipe: str) -> None:
    eager = config.replace(output_dir=str(tmp_path / "eager"), compile=False)
    training.train(eager)
    for (step, loss, _, lr, *_), (_, expected, _, expected_lr, *_) in zip(curve(config), curve(eager), strict=True):
        assert lr == expected_lr
        # A rounding to bf16 (or FP8) may fall the other way where the compiler keeps float32 between two operations.
        assert loss == pytest.approx(expected, rel=2**-9 if recipe == "none" else 2**-7), f"step {step}"


@pytest.mark.slow
def test_one_graph_serves_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Learning rate, tokens per expert, data and step change all the time, and nothing is compiled again."""
    config = compiled_run(tmp_path, "mxfp8", moe=True)
    config = config.replace(data=config.data.replace(validation_fraction=0.0))
    training.train(config)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert_near_eager(config, tmp_path, "mxfp8")

    interrupted = config.replace(output_dir=str(tmp_path / "interrupted"))
    run_until_killed(interrupted, "step", 3)
    training.train(interrupted)
    assert curve(interrupted) == curve(config)
    one, two = Path(config.output_dir), Path(interrupted.output_dir)
    assert_same_bits(tensors_under(training.latest_checkpoint(two)), tensors_under(training.latest_checkpoint(one)))


@pytest.mark.slow
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_and_evaluation_are_one_graph_each(tmp_path: Path, recipe: str, moe: bool) -> None:
    config = compiled_run(tmp_path, recipe, moe).replace(evaluation=training.EvaluationConfig(every=2, batches=1))
    training.train(config)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert_near_eager(config, tmp_path, recipe)
