"""Two processes with gloo train as one does with twice the accumulation, and resume bitwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from te_models.training import TrainConfig, TrainingCheckpointError, train
from te_models.training.distributed import (
    Ranks,
    average_gradients,
    gather_tensors,
    mean_over_ranks,
    ranks_from_environment,
)
from te_models.training.start import check_same_start
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


def test_ranks_wait_for_a_data_set_however_long_it_takes(tmp_path: Path) -> None:
    """Longer than their collectives wait for each other: half an hour, and ten minutes on GPUs."""
    file, script = tmp_path / "config.json", tmp_path / "ranks.py"
    file.write_text(tiny_run(tmp_path, moe=False, steps=1).to_json())
    setup = """
import time, torch.distributed as dist
from datetime import timedelta
import te_models.training.build as build
def slowly(*arguments, build_dataset=build.build_dataset):
    time.sleep(5)
    return build_dataset(*arguments)
build.build_dataset = slowly
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
"""
    script.write_text(setup + SCRIPT + "dist.destroy_process_group()\n")
    run_on_ranks([str(script), str(file)], timeout=120)


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


def test_numbers_go_where_the_backend_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor in main memory, where the losses of a step and the random states are."""

    def send(*arguments: torch.Tensor) -> None:
        raise RuntimeError(f"sent from {arguments[-1].device}")

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "meta:nccl")
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(torch.distributed, name, send)
    with pytest.raises(RuntimeError, match="sent from meta"):
        mean_over_ranks(torch.zeros(2), Ranks(0, 2))
    with pytest.raises(RuntimeError, match="sent from meta"):
        gather_tensors({"state": torch.zeros(2)}, Ranks(0, 2))


def test_main_gradients_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with fuse_wgrad_accumulation: each rank would train its own model otherwise."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, **_: flat.mul_(3))
    fused, plain = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    fused.main_grad = torch.full((2,), 4.0)
    plain.grad = torch.full((2,), 6.0)
    average_gradients([fused, plain], Ranks(0, 2))
    assert fused.main_grad.tolist() == [6.0, 6.0] and fused.grad is None
    assert plain.grad.tolist() == [9.0, 9.0]


def test_ranks_that_see_different_checkpoints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"0.step": torch.tensor([4]), "1.step": torch.tensor([0])}
    monkeypatch.setattr("te_models.training.start.gather_tensors", lambda tensors, ranks: steps)
    with pytest.raises(TrainingCheckpointError, match="rank 0 continues from step 4 and rank 1 from step 0"):
        check_same_start(None, Ranks(1, 2))


def test_a_group_that_the_caller_joined_is_used_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would train one by one otherwise, all into one folder."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment("cpu") == Ranks()
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2, "new_group": None}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value, **_: value)
    ranks = ranks_from_environment("cpu")
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.owns_group) == (1, 2, None, False)
