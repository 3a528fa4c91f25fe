"""Dashboards get the rows of the metrics file, each step once, also of a run that continues."""

import contextlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from te_models.config import ConfigError
from te_models.extras import MissingExtraError
from te_models.training import TrainConfig, train
from te_models.training.log.histograms import histogram, histograms_of, scalars_of
from te_models.training.log.writers import WANDB, WandbWriter, open_writers
from tests.training.runs import rows_of, tiny_run

ROW = {
    "step": 3,
    "loss": 2.0,
    "grad_norm": None,
    "skipped": True,
    "validation_losses": {"code": 1.5},
    "experts": {"max_load": [1.25, 2.0]},
    "expert_tokens": [[3, 1], [0, 4]],
    "quantization": {
        "a.input": {"amax": 4.0, "scale_min": 0.5, "scale_max": 0.5, "underflow": 0.25, "saturation": 0.0},
        "b.fc1.input": {"amax": 1.0, "scale_min": 0.25, "scale_max": 2.0, "underflow": 0.5, "saturation": 0.0},
        "b.grad_output": {"amax": None, "scale_min": 1.0, "scale_max": 1.0, "underflow": 0.0, "saturation": 1.0},
    },
}


def test_the_numbers_of_a_row_have_names() -> None:
    assert scalars_of(ROW) == {
        "loss": 2.0,
        "skipped": 1.0,
        "validation_losses/code": 1.5,
        "experts/max_load/0": 1.25,
        "experts/max_load/1": 2.0,
        "quantization/input/amax": 4.0,
        "quantization/input/underflow": 0.5,
        "quantization/input/saturation": 0.0,
        "quantization/grad_output/underflow": 0.0,
        "quantization/grad_output/saturation": 1.0,
    }


def test_histograms_are_of_experts_and_of_layers() -> None:
    found = histograms_of(ROW)
    assert found["expert_tokens/0"] == ([3.0, 1.0], [-0.5, 0.5, 1.5])
    amax = found["quantization/input/log2_amax"]
    assert (amax.edges[0], amax.edges[-1], amax.counts[0], amax.counts[-1]) == (0.0, 2.0, 1.0, 1.0)
    assert "quantization/grad_output/log2_amax" not in found  # infinite
    assert sum(found["quantization/grad_output/saturation"].counts) == 1
    assert histograms_of({"step": 1, "loss": 2.0}) == {} and histogram([2.0, 2.0]).edges[0] == 1.5


def run_of(tmp_path: Path, **log: Any) -> TrainConfig:
    config = tiny_run(tmp_path, moe=True, steps=4)
    return config.replace(log=config.log.replace(histogram_interval=2, **log))


def write_steps(config: TrainConfig, finished: int, last: int) -> None:
    """Do what a run does that has finished some steps, for the steps until `last`."""
    folder = Path(config.output_dir)
    with contextlib.ExitStack() as opened:
        writers = [opened.enter_context(writer) for writer in open_writers(config, folder, finished)]
        for step in range(finished + 1, last + 1):
            for writer in writers:
                writer.write({**ROW, "step": step, "loss": 8.0 / step})


def test_a_run_records_the_load_of_its_experts_when_it_is_due(tmp_path: Path) -> None:
    config = run_of(tmp_path).replace(steps=2)
    train(config)
    rows = rows_of(config)
    assert [[sum(layer) for layer in row.get("expert_tokens", ())] for row in rows] == [[], [2 * 2 * 2 * 32] * 2]
    # micro-batches * windows * choices * tokens, of each layer
    assert [4 * max(layer) / sum(layer) for layer in rows[1]["expert_tokens"]] == rows[1]["experts"]["max_load"]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="writes the events (extra tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = run_of(tmp_path, writers=("tensorboard",))
    (tmp_path / "run").mkdir()
    write_steps(config, 0, 5)
    write_steps(config, 2, 4)  # killed in step 6, with a checkpoint of step 2
    folder = Path(config.output_dir) / "tensorboard"
    assert len([*folder.iterdir()]) == 2
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(1, 8.0), (2, 4.0), (3, pytest.approx(8 / 3)), (4, 2.0)]
    load = events.Histograms("expert_tokens/1")
    assert [event.step for event in load] == [1, 2, 3, 4]
    assert (load[0].histogram_value.bucket_limit, load[0].histogram_value.bucket) == ([0.5, 1.5], [0.0, 4.0])
    assert {file.parent for file in folder.rglob("*") if file.is_file()} == {folder}  # no second run
    hparams = events.summary_metadata
    begun = HParamsPluginData.FromString(hparams["_hparams_/session_start_info"].plugin_data.content)
    compared = begun.session_start_info.hparams
    assert compared["optimizer.lr"].number_value == config.optimizer.lr
    assert compared["model.config.moe.layers"].string_value == "[0, 1]" and "output_dir" not in compared
    kinds = HParamsPluginData.FromString(hparams["_hparams_/experiment"].plugin_data.content).experiment
    assert "loss" in {metric.name.tag for metric in kinds.metric_infos}
    assert "_hparams_/session_end_info" in hparams
    assert '"histogram_interval": 2' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


class FakeRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.rows, self.exit_code = arguments, {}, None

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows[step] = values

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of W&B's interface that notes its runs."""
    fake: Any = types.ModuleType("wandb")
    fake.Error, fake.Settings, fake.runs = type("Error", (Exception,), {}), lambda **settings: settings, []
    fake.Histogram = lambda np_histogram: np_histogram
    fake.init = lambda **arguments: fake.runs.append(FakeRun(arguments)) or fake.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_continues_its_run_and_shows_each_step_once(tmp_path: Path, wandb: Any) -> None:
    config = run_of(tmp_path, writers=("wandb",), wandb_project="ours")
    (tmp_path / "run").mkdir()
    for finished, last in ((0, 5), (2, 3), (2, 6)):  # killed twice: the third time the metrics file ends with step 3
        write_steps(config, finished, last)
    first, second, third = wandb.runs
    assert ([*first.rows], [*second.rows], [*third.rows]) == ([1, 2, 3, 4, 5], [], [6])
    assert first.rows[2]["loss"] == 4.0 and first.rows[2]["expert_tokens/0"] == ([3.0, 1.0], [-0.5, 0.5, 1.5])
    assert first.arguments["id"] == third.arguments["id"] and third.arguments["resume"] == "allow"
    assert (first.arguments["project"], first.arguments["name"], first.exit_code) == ("ours", "run", 0)
    assert first.arguments["config"]["steps"] == 4
    write_steps(config.replace(log=config.log.replace(wandb_mode="offline")), 0, 1)  # a new run in the same folder
    assert [*wandb.runs[3].rows] == [1] and wandb.runs[3].arguments["id"] != first.arguments["id"]
    assert (wandb.runs[3].arguments["mode"], wandb.runs[3].arguments["resume"]) == ("offline", None)


def test_wandb_that_does_not_begin_is_one_sentence(tmp_path: Path, wandb: Any) -> None:
    def refuse(**_: Any) -> None:
        raise wandb.Error("no API key")

    wandb.init = refuse
    with pytest.raises(ConfigError, match=r"no API key; log.wandb_mode = 'offline' needs no account"):
        WandbWriter(tmp_path, run_of(tmp_path), keep_steps=0, written_steps=0)
    assert len(json.loads((tmp_path / WANDB).read_text())["id"]) == 32


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        config = run_of(tmp_path, writers=(name,))
        with pytest.raises(MissingExtraError, match=rf"log.writers = {name} needs .* 'te_models\[{name}\]'"):
            train(config)
        assert not Path(config.output_dir).exists()
    with pytest.raises(ConfigError, match=r"log.writers is \['wandb', 'wandb'\]; allowed: each name once"):
        run_of(tmp_path, writers=("wandb", "wandb"))
    (alone,) = open_writers(run_of(tmp_path), tmp_path, 0)
    with alone:
        assert (tmp_path / "metrics.jsonl").is_file()
