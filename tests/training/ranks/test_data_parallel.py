"""Two processes with gloo train as one does with twice the accumulation, and resume bitwise."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from te_models.config import ConfigError
from te_models.layers import DelayedScaling, Linear, recipe_state, set_rounding_seed
from te_models.parallel import ParallelDims
from te_models.training import PrecisionConfig, TrainingCheckpointError, train
from te_models.training.checkpoints.checkpoint import TrainingState, load_state
from te_models.training.checkpoints.recipes import complete_recipe_state
from te_models.training.checkpoints.start import check_same_run, check_same_start, restore_generators
from te_models.training.ranks.data_parallel import (
    Ranks,
    average_gradients,
    gather_tensors,
    mean_over_ranks,
    ranks_from_environment,
)
from tests.compare import refused
from tests.ranks import run_on_ranks
from tests.training.edited import edit_tensors, seal
from tests.training.processes import continued_on_two_and_one, train_on_ranks
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_model, tiny_run


def test_two_ranks_equal_one_and_resume(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "one", moe=False, steps=3)
    assert config.data.gradient_accumulation == 2
    train(config)
    ranks = config.replace(output_dir=str(tmp_path / "two"), data=config.data.replace(gradient_accumulation=1))
    train_on_ranks(ranks, tmp_path)
    assert [row[5] for row in curve(ranks)] == [row[5] for row in curve(config)]  # the same tokens
    for row, expected in zip(curve(ranks), curve(config), strict=True):
        assert row[1] == pytest.approx(expected[1], rel=1e-6)
        assert row[4] == pytest.approx(expected[4], rel=1e-5)
    one, two = tensors_under(Path(config.output_dir) / "final"), tensors_under(Path(ranks.output_dir) / "final")
    for name, tensor in two.items():
        # An Adam update is at most about lr in size and can flip where a gradient is all rounding: 3 steps of 3e-3.
        close = (tensor - one[name]).abs() < 1e-5
        assert close.float().mean() > 0.99 and (tensor - one[name]).abs().max() < 3 * 3e-3, name

    # The state of each rank is in the checkpoint, and is missed where it was lost.
    checkpoint = Path(ranks.output_dir) / "checkpoints" / "step-00000002"
    for name in ("rng.1.python", "rng.1.torch"):
        broken = shutil.copytree(checkpoint, tmp_path / name / checkpoint.name)
        edit_tensors(broken, lambda tensors, name=name: tensors.pop(name))
        seal(broken)
        with pytest.raises(TrainingCheckpointError, match="holds other rng tensors of rank 1 than of rank 0"):
            load_state(broken)

    # From the checkpoint of its second step, a run of two ranks continues bitwise.
    resumed = ranks.replace(output_dir=str(tmp_path / "resumed"))
    checkpoint = Path("checkpoints") / "step-00000002"
    shutil.copytree(Path(ranks.output_dir) / checkpoint, Path(resumed.output_dir) / checkpoint)
    train_on_ranks(resumed, tmp_path)
    assert_same_bits(tensors_under(Path(resumed.output_dir) / "final"), two)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_another_number_of_ranks_continues(tmp_path: Path, recipe: str) -> None:
    """One rank for two steps, then two for two, then one again: the losses are those of one rank all along."""
    precision = PrecisionConfig(dtype="fp32" if recipe == "none" else "bf16", recipe=recipe)
    alone = tiny_run(tmp_path, "alone", moe=False, steps=6, precision=precision)
    train(alone)
    for row, expected in continued_on_two_and_one(alone, tmp_path):
        assert row[5] == expected[5]
        assert row[1] == pytest.approx(expected[1], rel=1e-5 if recipe == "none" else 2e-3)


def test_a_rank_that_the_checkpoint_does_not_know_takes_scales_and_no_random_numbers() -> None:
    model = Linear(32, 32)
    model.prepare_recipe_state(DelayedScaling(amax_history_len=2))
    set_rounding_seed(model, 7)
    state = recipe_state(model)
    given = {name: torch.full_like(t, 3) for name, t in state.items()}
    tensors = {f"recipe.{rank}.{name}": t + rank for rank in (0, 1) for name, t in given.items()}
    live = complete_recipe_state(model, [DelayedScaling(amax_history_len=2)])
    restore_generators(TrainingState(1, 0, 2, {}, tensors), Ranks(3, 4), model, ParallelDims(ranks=4), live)
    for name, now in recipe_state(model).items():
        torch.testing.assert_close(now, state[name] if "rng" in name else given[name] + 1, rtol=0, atol=0)


def test_scales_are_those_of_the_rank_that_had_the_experts() -> None:
    """Ranks are numbered with split layers innermost: from ep 2 to tp 2 x ep 2, ranks 2 and 3 have what rank 1 had."""
    model = Linear(32, 32)
    model.prepare_recipe_state(DelayedScaling(amax_history_len=2))
    tensors = {
        f"recipe.{rank}.{n}": torch.full_like(t, 3 + rank) for rank in (0, 1) for n, t in recipe_state(model).items()
    }
    start = TrainingState(1, 0, 2, {"parallel": {"expert_model_parallel_size": 2}}, tensors)
    dims = ParallelDims(ranks=8, expert_model_parallel_size=2, tensor_model_parallel_size=2)
    for rank, expected in ((2, 4.0), (3, 4.0), (4, 3.0), (7, 4.0)):
        restore_generators(start, Ranks(rank, 8), model, dims, complete_recipe_state(model, []))
        assert {float(t.flatten()[0]) for n, t in recipe_state(model).items() if "scale" in n} == {expected}, rank


def test_a_step_of_other_windows_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, steps=1)
    start = TrainingState(1, 4, 2, config.to_dict(), {})
    check_same_run(config, start, Ranks(0, 2))
    check_same_run(config.replace(data=config.data.replace(gradient_accumulation=1)), start, Ranks(3, 4))
    with pytest.raises(ConfigError, match=r"had 4 micro-batches.* on each of 2 ranks, and has 8 on 4; allowed: a grad"):
        check_same_run(config, start, Ranks(0, 4))
    with pytest.raises(ConfigError, match=r"data.micro_batch_size differ"):
        check_same_run(config.replace(data=config.data.replace(micro_batch_size=4)), start, Ranks(0, 2))


@pytest.mark.slow
def test_ranks_wait_for_a_data_set_however_long_it_takes(tmp_path: Path) -> None:
    """Longer than their collectives wait for each other: half an hour, and ten minutes on GPUs."""
    setup = """
import time, torch.distributed as dist
from datetime import timedelta
import te_models.training.run_data as build
def slowly(*arguments, build_dataset=build.build_dataset, **options):
    time.sleep(5)
    return build_dataset(*arguments, **options)
build.build_dataset = slowly
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
"""
    run = tiny_run(tmp_path, moe=False, steps=1)
    train_on_ranks(run, tmp_path, before=setup, after="dist.destroy_process_group()\n")


@pytest.mark.slow
def test_the_command_line_reports_once(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, steps=1)
    output_dir, data, text = map(json.dumps, [config.output_dir, config.data.path, config.data.text[0]])
    file = tmp_path / "train.toml"
    file.write_text(
        f"output_dir = {output_dir}\nsteps = 1\ndevice = 'cpu'\ncompile = false\nlog.progress = false\n"
        f'[data]\npath = {data}\ntext = [{text}]\ntokenizer = "bytes"\nsequence_length = 32\n'
        f'[precision]\ndtype = "fp32"\n[model]\nconfig_file = {json.dumps(str(tmp_path / "model.json"))}\n'
    )
    (tmp_path / "model.json").write_text(tiny_model().to_json())
    for option in ("--json", "--dry-run"):
        first, second = run_on_ranks(["-m", "te_models", "train", str(file), option], timeout=120)
        assert json.loads(first)["output_dir" if option == "--dry-run" else "step"] and second == ""


def test_numbers_go_where_the_backend_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor in main memory, where the losses of a step and the random states are."""

    def send(*arguments: torch.Tensor, **_: object) -> None:
        raise RuntimeError(f"sent from {arguments[-1].device}")

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "meta:nccl")
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(torch.distributed, name, send)
    refused(lambda: mean_over_ranks(torch.zeros(2), Ranks(0, 2)), "sent from meta", error=RuntimeError)
    refused(lambda: gather_tensors({"state": torch.zeros(2)}, Ranks(0, 2)), "sent from meta", error=RuntimeError)


def test_main_gradients_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with fuse_wgrad_accumulation: each rank would train its own model otherwise."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, **_: [flat.mul_(3), None][1])
    fused, plain = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    fused.main_grad = torch.full((2,), 4.0)
    plain.grad = torch.full((2,), 6.0)
    average_gradients([fused, plain], Ranks(0, 2))
    assert fused.main_grad.tolist() == [6.0, 6.0] and fused.grad is None
    assert plain.grad.tolist() == [9.0, 9.0]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([4, 7, 0], [0, 0, 0], "rank 0 continues from step 4 and rank 1 from step 0"),
        ([4, 7, 0], [4, 8, 0], "rank 0 and rank 1 see different checkpoints of step 4"),
        ([0, 0, 1], [4, 7, 0], "rank 0 has no checkpoint that it can continue from; it says why"),
    ],
)
def test_ranks_that_see_different_checkpoints_are_refused(
    first: list[int], second: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"0.start": torch.tensor(first), "1.start": torch.tensor(second)}
    monkeypatch.setattr("te_models.training.checkpoints.start.gather_tensors", lambda tensors, ranks: found)
    refused(lambda: check_same_start(None, Ranks(1, 2)), message, error=TrainingCheckpointError)


def test_a_group_that_the_caller_joined_is_used_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would train one by one otherwise, all into one folder."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment("cpu") == Ranks()
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value, **_: value)
    ranks = ranks_from_environment("cpu")
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.owns_group) == (1, 2, None, False)
