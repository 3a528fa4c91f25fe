"""[profile] writes the trace of its steps, a file of each rank that is there complete or not at all."""

import json
from pathlib import Path

import pytest
import torch

from te_models.config import ConfigError
from te_models.training import ProfileConfig, train
from te_models.training.log.profiler import StepProfiler
from te_models.training.ranks.data_parallel import Ranks
from tests.training.runs import tiny_run


def names_of(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def test_a_run_traces_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    train(tiny_run(tmp_path, steps=3, profile=ProfileConfig(start_step=2, num_steps=1)))
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "rank0.steps-2-2.json"
    names = names_of(trace)
    assert "step 2" in names and not {"step 1", "step 3"} & {*names}
    assert "aten::mm" in names


def test_every_rank_has_a_file_also_where_the_run_ends_early(tmp_path: Path) -> None:
    config = ProfileConfig(start_step=5, num_steps=10, folder=str(tmp_path / "traces"))
    with pytest.raises(RuntimeError, match="no loss"), StepProfiler(config, tmp_path, "cpu", Ranks(rank=3)) as profiler:
        for step in (4, 5, 6):
            profiler.begin(step)
            torch.ones(3).add(1)
            if step == 6:
                raise RuntimeError("no loss")
            profiler.end(step)
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "rank3.steps-5-6.json" and {"step 5", "step 6", "aten::add"} <= {*names_of(trace)}


def test_steps_that_a_run_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile.num_steps is 3; allowed: up to steps = 6 from 5 on"):
        tiny_run(tmp_path, profile=ProfileConfig(start_step=5, num_steps=3))
    with pytest.raises(ConfigError, match=r"profile.start_step is 0; allowed: a positive integer"):
        ProfileConfig(start_step=0)
