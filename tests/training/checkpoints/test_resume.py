"""An interrupted run continues bit for bit: weights, moments, random states, losses. Children die of real SIGKILLs."""

import errno
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import training
from te_models.checkpoints import CheckpointError
from te_models.config import ConfigError
from te_models.training.checkpoints import start
from te_models.training.checkpoints.checkpoint import TrainingState, load_state
from te_models.training.step import StepResult, train_step
from tests.training.child import run_and_kill_from_outside, run_until_killed
from tests.training.runs import assert_continues_as, assert_same_bits, cut_after, tensors_under, tiny_run


@dataclass
class Reference:
    """An uninterrupted run, beside which interrupted ones are made."""

    folder: Path
    config: training.TrainConfig

    def run_of(self, name: str, **changes: object) -> training.TrainConfig:
        return self.config.replace(output_dir=str(self.folder / name), **changes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    config = tiny_run(folder, moe=True, steps=6, evaluation=training.EvaluationConfig(every=3, batches=2))
    training.train(config)
    return Reference(folder, config)


@pytest.mark.sentinels("steps4")
@pytest.mark.parametrize("steps", [(), *((n,) for n in range(6)), (3, 2)])
def test_killed_never_or_before_any_step_or_twice(reference: Reference, steps: tuple[int, ...]) -> None:
    config = reference.run_of(f"steps {steps}")
    for step in steps:
        run_until_killed(config, "step", step)
    assert_continues_as(config, reference.config)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_killed_from_outside_at_any_moment(reference: Reference, rows: int) -> None:
    config = reference.run_of(f"outside{rows}")
    run_and_kill_from_outside(config, rows)
    assert_continues_as(config, reference.config)


@pytest.mark.parametrize(
    # flushes 16-29 are those of the second save; the last is of the folder in which it has just appeared
    ("where", "count"),
    [("half a file", 1), *(pytest.param("flush", n, marks=pytest.mark.slow) for n in (16, 22, 27, 29))],
)
def test_killed_during_a_save(reference: Reference, where: str, count: int) -> None:
    """A save that died leaves the previous checkpoint, and the next one cleans up after it."""
    config = reference.run_of(f"save {where} {count}")
    run_until_killed(config, where, count)
    output_dir = Path(config.output_dir)
    steps = [load_state(folder).step for folder in training.list_checkpoints(output_dir)]
    assert steps, "there is no checkpoint, of which all can be read"
    assert_continues_as(config, reference.config)
    assert not list((output_dir / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_first_save_that_dies_leaves_a_run_that_starts_again(reference: Reference) -> None:
    config = reference.run_of("first save")
    run_until_killed(config, "half a file", 0)
    assert training.list_checkpoints(Path(config.output_dir)) == []
    assert_continues_as(config, reference.config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "bf16-mixed"])
def test_other_precisions_resume_bitwise(tmp_path: Path, dtype: str) -> None:
    optimizer = training.OptimizerConfig(lr=3e-3, master_weights=dtype == "bf16")
    config = tiny_run(tmp_path, moe=True, steps=4, precision=training.PrecisionConfig(dtype=dtype), optimizer=optimizer)
    training.train(config)
    interrupted = config.replace(output_dir=str(tmp_path / "interrupted"))
    run_until_killed(interrupted, "step", 3)
    assert_continues_as(interrupted, config)


def test_a_full_disk_is_told_by_the_checkpoints_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("te_models.checkpoints.write.writer.write_weights", fail)
    config = tiny_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"writing .*step-00000002 failed: training.safetensors: .*No space left"):
        training.train(config)
    assert {path.name for path in Path(config.output_dir).iterdir()} == {"metrics.jsonl", "starts.jsonl"}


def test_a_finished_run_has_nothing_left_to_do(reference: Reference) -> None:
    before = tensors_under(Path(reference.config.output_dir))
    result = training.train(reference.config)
    assert (result.step, result.loss) == (6, None)
    assert_same_bits(tensors_under(Path(reference.config.output_dir)), before)


def test_a_continued_run_lets_go_of_what_it_read(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors map the file, which would take its place on the disk for the whole run after it was removed."""
    config = cut_after(reference.config, "continued", 2)
    read: list[weakref.ref[torch.Tensor]] = []

    def load(folder: Path, **options: Any) -> TrainingState:
        state = load_state(folder, **options)
        read.extend(map(weakref.ref, state.tensors.values()))
        return state

    def step(*arguments: Any, **options: Any) -> StepResult:
        assert read and all(tensor() is None for tensor in read)
        return train_step(*arguments, **options)

    monkeypatch.setattr(start, "load_state", load)
    monkeypatch.setattr(training.loop, "train_step", step)
    assert training.train(config).step == 6


def test_keep_last_keeps_the_newest(reference: Reference) -> None:
    config = reference.run_of("keep", checkpoint=training.CheckpointConfig(every=1, keep_last=2))
    training.train(config)
    names = [folder.name for folder in training.list_checkpoints(Path(config.output_dir))]
    assert names == ["step-00000005", "step-00000006"]
    assert len(list((Path(config.output_dir) / "checkpoints").iterdir())) == 2


def test_nothing_is_pickled(reference: Reference) -> None:
    suffixes = {file.suffix for file in Path(reference.config.output_dir).rglob("*") if file.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jsonl"}


def test_a_different_run_is_refused_by_name(reference: Reference) -> None:
    for name, field, value in (
        ("seed", "seed", 1),
        ("optimizer", "optimizer.lr, optimizer.eps", training.OptimizerConfig(lr=1.0, eps=1e-6)),
        ("precision", "precision.dtype", training.PrecisionConfig(dtype="bf16")),
    ):
        with pytest.raises(ConfigError, match=f"cannot continue from step 6: {field} differ"):
            training.train(reference.config.replace(**{name: value}))
    with pytest.raises(ConfigError, match="holds another run and resume is off"):
        training.train(reference.config.replace(resume=False))


def test_what_gets_a_run_going_again_may_change(reference: Reference) -> None:
    """A run that always stops at an infinite gradient, or runs out of memory, had to begin anew; it is the same run."""
    config = reference.run_of("going-again")
    run_until_killed(config, "step", 3)
    source = config.model.replace(activation_checkpointing=True)
    config = config.replace(model=source, optimizer=config.optimizer.replace(skip_nonfinite=True))
    assert_continues_as(config, reference.config)
