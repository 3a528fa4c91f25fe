"""Batches that grow over a run: sizes and positions of the formula, tokens in the metrics, and a bitwise resume."""

from dataclasses import replace
from pathlib import Path

import pytest

from te_models import ConfigError
from te_models.training import read_metrics, train
from te_models.training.data.batch_size import BatchSize
from tests.training.runs import curve, tiny_run


def test_sizes_and_positions() -> None:
    batch = BatchSize(windows=16, multiple=4, ramp=(4, 4, 60))
    sizes, position = [], 0
    for step in range(12):
        assert batch.position(step) == position
        sizes.append(batch.at(position))
        position += sizes[-1]
    # each of the three sizes below the full one lasts 20 windows
    assert sizes == [4] * 5 + [8] * 3 + [12] * 2 + [16] * 2
    assert BatchSize(windows=16).position(1000) == 16_000
    assert BatchSize(windows=16, multiple=4, ramp=(4, 4, 60)).micro_batches() == [1, 2, 3, 4]
    assert BatchSize(windows=16, multiple=4).micro_batches() == [4]
    with pytest.raises(ConfigError, match=r"rampup_batch_size is \[4, 5, 60\]; allowed: a start below the 16 windows"):
        BatchSize(windows=16, ramp=(4, 5, 60))
    with pytest.raises(ConfigError, match=r"rampup_batch_size is \[2, 2, 60\]; .* multiples of 4, the windows"):
        BatchSize(windows=16, multiple=4, ramp=(2, 2, 60))


def test_a_run_grows_and_resumes(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "whole", steps=5)
    config = replace(config, data=replace(config.data, gradient_accumulation=3, rampup_batch_size=(2, 2, 8)))
    assert [row["tokens"] // 32 for row in read_metrics(train(config).metrics_file)] == [2, 4, 8, 14, 20]
    parts = replace(config, output_dir=str(tmp_path / "parts"), resume=True)
    hold = replace(config.schedule, steps=5)
    train(replace(parts, steps=2, schedule=hold))
    train(replace(parts, schedule=hold))
    assert [row[:-1] for row in curve(parts)] == [row[:-1] for row in curve(config)]  # both validate at their end
