"""Two processes with gloo train as one does with twice the accumulation, and resume bitwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from te_models.training import TrainConfig, train
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_model, tiny_run

SCRIPT = """
import sys, torch
from pathlib import Path
from te_models.training import TrainConfig, train
torch.set_num_threads(1)
train(TrainConfig.from_json(Path(sys.argv[1]).read_text()))
"""


pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


def train_on_two_ranks(config: TrainConfig, tmp_path: Path) -> None:
    file, script = tmp_path / "config.json", tmp_path / "ranks.py"
    file.write_text(config.to_json())
    script.write_text(SCRIPT)
    run_on_ranks([str(script), str(file)], timeout=120)


def test_two_ranks_equal_one_and_resume(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "one", moe=False, steps=3)
    assert config.data.gradient_accumulation == 2
    train(config)
    split = config.data.replace(gradient_accumulation=1)
    ranks = config.replace(output_dir=str(tmp_path / "two"), data=split)
    train_on_two_ranks(ranks, tmp_path)
    assert [row[5] for row in curve(ranks)] == [row[5] for row in curve(config)]  # the same tokens
    for row, expected in zip(curve(ranks), curve(config), strict=True):
        assert row[1] == pytest.approx(expected[1], rel=1e-6)
        assert row[4] == pytest.approx(expected[4], rel=1e-5)
    one, two = tensors_under(Path(config.output_dir) / "final"), tensors_under(Path(ranks.output_dir) / "final")
    for name, tensor in two.items():
        # An Adam update is at most about lr in size and can flip where a gradient is all rounding: 3 steps of 3e-3.
        close = (tensor - one[name]).abs() < 1e-5
        assert close.float().mean() > 0.99 and (tensor - one[name]).abs().max() < 3 * 3e-3, name

    # From the checkpoint of its second step, a run of two ranks continues bitwise.
    resumed = ranks.replace(output_dir=str(tmp_path / "resumed"))
    checkpoint = Path("checkpoints") / "step-00000002"
    shutil.copytree(Path(ranks.output_dir) / checkpoint, Path(resumed.output_dir) / checkpoint)
    train_on_two_ranks(resumed, tmp_path)
    assert_same_bits(tensors_under(Path(resumed.output_dir) / "final"), two)


def test_the_command_line_reports_once(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, steps=1)
    values = [config.output_dir, config.data.path, config.data.text[0]]
    output_dir, data, text = map(json.dumps, values)
    file = tmp_path / "train.toml"
    file.write_text(
        f"output_dir = {output_dir}\nsteps = 1\ndevice = 'cpu'\ncompile = false\nlog.progress = false\n"
        f'[data]\npath = {data}\ntext = [{text}]\ntokenizer = "bytes"\nsequence_length = 32\n'
        f'[precision]\ndtype = "fp32"\n[model]\nconfig_file = {json.dumps(str(tmp_path / "model.json"))}\n'
    )
    (tmp_path / "model.json").write_text(tiny_model().to_json())
    for option in ("--json", "--dry-run"):
        first, second = run_on_ranks(["-m", "te_models", "train", str(file), option], timeout=120)
        assert json.loads(first)["output_dir" if option == "--dry-run" else "step"]
        assert second == ""
