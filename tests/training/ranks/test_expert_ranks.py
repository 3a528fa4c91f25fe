"""Training with experts distributed over ranks equals training on one rank, and continues bit for bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_models import training
from te_models.config import ConfigError
from te_models.parallel import ParallelDims
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.ranks.experts import ExpertRanks
from te_models.training.ranks.reduction import reduce_gradients
from tests.training.processes import continued_on_two_and_one, train_on_ranks
from tests.training.runs import assert_same_bits, curve, rows_of, tensors_under, tiny_run

JOIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
RESUME = """
import shutil
if dist.get_rank() == 0:
    name = "checkpoints/step-00000002"
    shutil.copytree(Path(config.output_dir) / name, Path(config.output_dir + "-resumed") / name)
dist.barrier()
train(config.replace(output_dir=config.output_dir + "-resumed"))
dist.destroy_process_group()
"""

DISTRIBUTED = training.ParallelConfig(expert_model_parallel_size=2)


def run_of(tmp_path: Path, name: str, accumulation: int, **changes: Any) -> training.TrainConfig:
    """A run of four micro-batches a step in all, whose gradients are clipped."""
    optimizer = training.OptimizerConfig(lr=3e-3, clip_grad_norm=0.1)
    values = {"steps": 3, "optimizer": optimizer} | changes
    values = {"checkpoint": training.CheckpointConfig(every=2, keep_last=0)} | values
    config = tiny_run(tmp_path, name, moe=True, evaluation=training.EvaluationConfig(every=2, batches=1), **values)
    return config.replace(data=config.data.replace(gradient_accumulation=accumulation))


def train_and_resume(config: training.TrainConfig, ranks: int, tmp_path: Path) -> None:
    """Train over so many ranks with two ranks to a copy of the experts; then again from the second step on, bitwise."""
    config = config.replace(parallel=DISTRIBUTED)
    train_on_ranks(config, tmp_path, ranks=ranks, before=JOIN, after=RESUME)
    first, again = Path(config.output_dir), Path(config.output_dir + "-resumed")
    for folder in ("final", "checkpoints/step-00000003"):
        assert_same_bits(tensors_under(again / folder), tensors_under(first / folder))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_distributed_experts_train_as_on_one_rank(ranks: int, tmp_path: Path) -> None:
    alone = run_of(tmp_path, "alone", 4)
    training.train(alone)
    together = run_of(tmp_path, "together", 4 // ranks)
    train_and_resume(together, ranks, tmp_path)
    for row, expected in zip(curve(together), curve(alone), strict=True):
        assert row[5] == expected[5]  # the same tokens
        assert row[1] == pytest.approx(expected[1], rel=1e-6)  # loss
        assert row[2] == pytest.approx(expected[2], rel=1e-5)  # router losses
        assert row[4] == pytest.approx(expected[4], rel=1e-5)  # the norm: every expert counts, and once
        assert row[4] > 0.1
    found, expected = (rows_of(run)[0] for run in (together, alone))
    assert found["experts"] == expected["experts"]
    # what is saved is the whole model: its weights, and the moments of all experts where one rank has them
    one, two = (tensors_under(training.latest_checkpoint(Path(run.output_dir))) for run in (alone, together))
    assert one.keys() <= two.keys()  # of the random states there is one for each rank
    for name, expected in one.items():
        if "rng." not in name:
            assert two[name].shape == expected.shape, name
        if "exp_avg" in name:  # of the gradients, which is how an expert in a wrong place would show
            assert (two[name] - expected).norm() <= 1e-3 * expected.norm() + 1e-12, name
        elif name.startswith("model/"):
            close = (two[name] - expected).abs() < 1e-5
            assert close.float().mean() > 0.99 and (two[name] - expected).abs().max() < 3 * 3e-3, name


def test_a_stage_of_dense_layers_has_none() -> None:
    """Its gradients are averaged as those of a model without experts."""
    experts = ExpertRanks((), None, None, 2.0)
    assert not experts.owns(torch.zeros(1))
    parameters = {"weight": torch.nn.Parameter(torch.ones(2))}
    optimizer: Any = SimpleNamespace(experts=experts, places=None, parameters=parameters)
    optimizer.parameters["weight"].grad = torch.full((2,), 3.0)
    reduce_gradients(optimizer, Ranks())
    assert optimizer.parameters["weight"].grad.tolist() == [3.0, 3.0]


@pytest.mark.slow
def test_weights_and_moments_of_eight_bits_continue(tmp_path: Path) -> None:
    precision = training.PrecisionConfig(dtype="bf16", recipe="mxfp8", quantized_weights=True)
    optimizer = training.OptimizerConfig(moment_dtype="float8")
    run = run_of(tmp_path, "quantized", 2, precision=precision, optimizer=optimizer)
    train_and_resume(run, 2, tmp_path)


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.expert_model_parallel_size is 0; allowed: a positive integer"):
        training.ParallelConfig(expert_model_parallel_size=0)
    with pytest.raises(ConfigError, match="is 2; allowed: a divisor of data_parallel_replicate_size, 3"):
        ParallelDims(ranks=3, expert_model_parallel_size=2)
    with pytest.raises(ConfigError, match="is 2; allowed: a divisor of data_parallel_replicate_size, 1"):
        training.train(tiny_run(tmp_path, moe=True, parallel=DISTRIBUTED))


@pytest.mark.slow
def test_a_run_continues_with_another_distribution(tmp_path: Path) -> None:
    """One rank for two steps, then two that share the experts, then one again."""
    alone = run_of(tmp_path, "alone", 4, steps=6)
    training.train(alone)
    for row, expected in continued_on_two_and_one(alone, tmp_path, parallel=DISTRIBUTED):
        assert row[1] == pytest.approx(expected[1], rel=1e-5)
        assert row[4] == pytest.approx(expected[4], rel=1e-4)
