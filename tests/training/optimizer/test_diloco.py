"""Local steps (DiLoCo): replicas step alone, an outer optimizer joins them, and a resumed run repeats its bits."""

from pathlib import Path

import pytest
import torch

from te_models.config import ConfigError
from te_models.training import CheckpointConfig, DiLoCoConfig, ParallelConfig, TrainConfig, train
from tests.compare import refused
from tests.training.processes import train_on_ranks
from tests.training.runs import assert_same_bits, rows_of, tensors_under, tiny_run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

RECORD = """
import torch, os
from te_models.training.optimizer import diloco
after = diloco.OuterOptimizer.after
def recorded(self, step):
    before = {name: value.clone() for name, value in self._wide().items()}
    begun = {name: value.clone() for name, value in self.weights.items()}
    ended = after(self, step)
    torch.save([before, begun, self._wide()], f"{FOLDER}/{step}.{self.ranks.rank}")
    return ended
diloco.OuterOptimizer.after = recorded
"""


def run_of(folder: Path, name: str = "run", **changes: object) -> TrainConfig:
    config = tiny_run(folder, steps=6, checkpoint=CheckpointConfig(every=2, keep_last=0))
    local = DiLoCoConfig(inner_steps=3, outer_lr=0.7, outer_momentum=0.9)
    return config.replace(output_dir=str(folder / name), diloco=local, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A run of two replicas, and what each had after each step."""
    folder = tmp_path_factory.mktemp("diloco")
    config = run_of(folder)
    train_on_ranks(config, folder, before=f"FOLDER = {str(folder)!r}" + RECORD)
    return config, folder


def test_the_outer_optimizer_is_sgd_with_nesterovs_momentum(whole: tuple[TrainConfig, Path]) -> None:
    """Written by hand: torch's SGD of the mean of what two replicas moved, in each of two rounds."""
    config, folder = whole
    moved = [[torch.load(folder / f"{step}.{rank}", weights_only=True) for rank in (0, 1)] for step in range(1, 7)]
    names = list(moved[0][0][0])
    for step in (1, 2, 4, 5):  # alone: what one learned, the other did not
        assert any(not torch.equal(*(moved[step - 1][rank][2][name] for rank in (0, 1))) for name in names)
    weights = [torch.nn.Parameter(moved[2][0][1][name].clone()) for name in names]
    outer = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    for step in (3, 6):
        (first, _, after), (second, _, other) = moved[step - 1]
        for weight, name in zip(weights, names, strict=True):
            weight.grad = weight.detach() - (first[name] + second[name]) / 2
        outer.step()
        for weight, name in zip(weights, names, strict=True):
            torch.testing.assert_close(weight.detach(), after[name], rtol=0, atol=2e-7)
            assert torch.equal(after[name], other[name]), name
    assert len(rows_of(config)) == 6


def test_replicas_resume_bit_for_bit(whole: tuple[TrainConfig, Path]) -> None:
    """From the middle of a round, where they have different weights, and what is exported is the outer ones."""
    config, folder = whole
    begun = Path(config.output_dir) / "checkpoints" / "step-00000004"
    again = config.replace(output_dir=str(folder / "again"), resume_from=str(begun))
    train_on_ranks(again, folder)
    assert_same_bits(*(tensors_under(Path(c.output_dir) / "final") for c in (again, config)))
    parts = "checkpoints/step-00000006/parts"
    assert_same_bits(*(tensors_under(Path(c.output_dir) / parts) for c in (again, config)))


def test_one_replica_goes_on_where_two_were(whole: tuple[TrainConfig, Path]) -> None:
    config, folder = whole
    begun = Path(config.output_dir) / "checkpoints" / "step-00000004"
    data = config.data.replace(gradient_accumulation=2 * config.data.gradient_accumulation)
    assert train(config.replace(output_dir=str(folder / "alone"), resume_from=str(begun), data=data)).step == 6


def test_what_replicas_cannot_be_is_refused(tmp_path: Path) -> None:
    split, multiple = ParallelConfig(tensor_model_parallel_size=2), "allowed: a multiple of diloco.inner_steps = 3"
    refused(lambda: run_of(tmp_path, steps=7), "steps is 7", multiple, error=ConfigError)
    refused(lambda: run_of(tmp_path, parallel=split), "tensor_model_parallel_size is 2; allowed: 1 ", error=ConfigError)


@pytest.mark.slow
def test_several_ranks_make_one_replica(tmp_path: Path) -> None:
    """Of four, two and two: the ranks of a replica have one model in every step, and a resumed run repeats its bits."""
    config = run_of(tmp_path).replace(diloco=DiLoCoConfig(inner_steps=3, replica_ranks=2))
    train_on_ranks(config, tmp_path, ranks=4, before=f"FOLDER = {str(tmp_path)!r}" + RECORD)
    for step in range(1, 7):
        first, partner, *others = (
            torch.load(tmp_path / f"{step}.{rank}", weights_only=True)[2 if step % 3 == 0 else 0] for rank in range(4)
        )
        assert all(torch.equal(first[name], partner[name]) for name in first)
        assert all(torch.equal(others[0][name], others[1][name]) for name in first)
        assert all(torch.equal(first[name], others[0][name]) for name in first) == (step % 3 == 0)
    begun = Path(config.output_dir) / "checkpoints" / "step-00000004"
    again = config.replace(output_dir=str(tmp_path / "again"), resume_from=str(begun))
    train_on_ranks(again, tmp_path, ranks=4)
    assert_same_bits(*(tensors_under(Path(c.output_dir) / "final") for c in (again, config)))
    says = "replica_ranks is 2; allowed: 1 without diloco.inner_steps"
    refused(lambda: DiLoCoConfig(replica_ranks=2), says, error=ConfigError)
