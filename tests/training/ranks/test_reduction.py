"""Gradients are reduced once a step, in buckets while the backward pass runs, and are the same."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_models.config import ConfigError
from te_models.parallel.parts import ShardOfParameter
from te_models.plan.simulation import Recorder, fake_ranks
from te_models.training import ParallelConfig, train
from te_models.training.optimizer.zero import SharedUpdate
from te_models.training.ranks import buckets, reduction
from te_models.training.ranks.buckets import Bucket, InOrder, ScatteredBucket, filled
from tests.compare import Operations
from tests.ranks import on_ranks
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_run

CALLS = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce") if hasattr(dist, name)]
"""Newer versions of torch call the first, older ones the second."""


class Counted:
    """Collectives of gradients, counted while a run goes on, and which of them ran inside a backward pass."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.inside = {"reduce_scatter": 0, "all_reduce": 0}, 0
        self.received = dict.fromkeys(self.calls, 0)
        """Bytes of sums that this rank was told."""
        self._backward = False
        plain = torch.Tensor.backward

        def backward(*arguments: Any, **options: Any) -> None:
            self._backward = True
            try:
                plain(*arguments, **options)
            finally:
                self._backward = False

        patch.setattr(torch.Tensor, "backward", backward)
        for name in CALLS:
            patch.setattr(dist, name, partial(self._counted, name, getattr(dist, name)))

    def _counted(self, name: str, call: Any, *arguments: Any, **options: Any) -> Any:
        name = name.removesuffix("_single").removesuffix("_tensor")
        if name == "reduce_scatter" or options.get("async_op"):
            self.calls[name] += 1
            self.received[name] += (arguments[0] if arguments else options["output"]).nbytes
            self.inside += self._backward
        return call(*arguments, **options)


def trained(folder: Path, name: str, *, moe: bool = False, limit: int = 1, **options: Any) -> tuple[Any, Counted]:
    """Train for two steps of four micro-batches on two ranks; return the run's configuration and what was counted.

    limit: bytes of a bucket."""
    config = tiny_run(folder, name, moe=moe, steps=2)
    dtype, clip = options.pop("dtype", "fp32"), options.pop("clip_grad_norm", 1.0)
    config = config.replace(
        parallel=config.parallel.replace(**options),
        data=config.data.replace(gradient_accumulation=4),
        precision=config.precision.replace(dtype=dtype),
        optimizer=config.optimizer.replace(clip_grad_norm=clip),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "Reduction", partial(reduction.Reduction, limit=limit))
        patch.setattr("te_models.training.setup.Reduction", partial(reduction.Reduction, limit=limit))
        counted = Counted(patch)
        train(config)
    return config, counted


@on_ranks(2)
@pytest.mark.sentinels("False-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("moe", [False, True])
def test_a_step_that_reduces_once_has_the_numbers_of_whole_parameters(tmp_path: Path, moe: bool, dtype: str) -> None:
    """A step reduces once, and gives the numbers of whole parameters."""
    run = partial(trained, tmp_path, moe=moe, dtype=dtype, data_parallel_shard_size=2)
    each, many = run(f"each {moe} {dtype}", reduce_gradients="micro_batch")
    once, few = run(f"once {moe} {dtype}", reduce_gradients="step")
    assert many.calls["reduce_scatter"] == 4 * few.calls["reduce_scatter"] > 0
    if dist.get_rank():
        return
    close = 2e-7 if dtype == "fp32" else 1e-3
    for row, right in zip(curve(once), curve(each), strict=True):
        assert row[1] == pytest.approx(right[1], rel=close)
        assert row[4] == pytest.approx(right[4], rel=10 * close)


RUNS = [(False, "fp32", {}), (False, "bf16", {}), (True, "fp32", {}), (True, "bf16", {})]
RUNS += [(True, "fp32", {"expert_model_parallel_size": 2})]


@on_ranks(2)
@pytest.mark.sentinels("False-bf16-sizes1")
@pytest.mark.parametrize(("moe", "dtype", "sizes"), [*RUNS, (True, "fp32", {"context_parallel_size": 2})])
def test_small_buckets_and_one_at_the_end_agree(tmp_path: Path, moe: bool, dtype: str, sizes: dict[str, int]) -> None:
    """Small buckets are summed while the backward pass runs, and one at the end gives the same bits."""
    one, late = trained(tmp_path, f"one {moe} {dtype}", moe=moe, dtype=dtype, limit=2**40, **sizes)
    many, early = trained(tmp_path, f"many {moe} {dtype}", moe=moe, dtype=dtype, limit=1, **sizes)
    assert buckets.IN_FLIGHT > 1
    assert late.calls["all_reduce"] < early.calls["all_reduce"] and early.inside > early.calls["all_reduce"] // 2
    if dist.get_rank() == 0:
        assert curve(many) == curve(one)
        assert_same_bits(tensors_under(Path(many.output_dir) / "final"), tensors_under(Path(one.output_dir) / "final"))


@on_ranks(2)
def test_sharded_parameters_reduced_once_equal_whole_ones(tmp_path: Path) -> None:
    """Two numbers have one sum: bits are equal, but for the order in which a norm adds up, which scales gradients."""
    one, _ = trained(tmp_path, "whole", clip_grad_norm=None)
    once, _ = trained(tmp_path, "sharded", clip_grad_norm=None, data_parallel_shard_size=2, reduce_gradients="step")
    if dist.get_rank() == 0:
        assert [row[1] for row in curve(once)] == [row[1] for row in curve(one)]
        assert_same_bits(*(tensors_under(Path(run.output_dir) / "final") for run in (once, one)))


@on_ranks(2)
@pytest.mark.sentinels("False-fp32-sizes0", "False-bf16-sizes1")
@pytest.mark.parametrize(("moe", "dtype", "sizes"), [*RUNS, (False, "fp32", {"context_parallel_size": 2})])
def test_ranks_receive_the_sums_they_update_by(tmp_path: Path, moe: bool, dtype: str, sizes: dict[str, int]) -> None:
    """Half of the bytes, beside the row that fills up 257 words, and all bits; a norm of parts within its rounding."""
    run = partial(trained, tmp_path, moe=moe, dtype=dtype, **sizes)
    whole, all_ = run("whole", clip_grad_norm=None)
    shared, own = run("shared", clip_grad_norm=None, use_distributed_optimizer=True)
    clipped, _ = run("clipped", clip_grad_norm=0.1)
    both, early = run("both", clip_grad_norm=0.1, use_distributed_optimizer=True)
    assert own.calls["all_reduce"] == 0 and early.inside > early.calls["reduce_scatter"] // 2 > 0
    assert 0.5 <= own.received["reduce_scatter"] / all_.received["all_reduce"] < 0.51
    if dist.get_rank() == 0:
        assert_same_bits(*(tensors_under(Path(run.output_dir) / "final") for run in (shared, whole)))
        for row, right in zip(curve(both), curve(clipped), strict=True):
            assert row[1] == pytest.approx(right[1], rel=2e-7 if dtype == "fp32" else 1e-4)
            assert row[4] == pytest.approx(right[4], rel=4e-7 if dtype == "fp32" else 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_gradients": "micro_batch"}, "'step' with data_parallel_shard_size = 1"),
        (
            {"reduce_gradients": "micro_batch", "data_parallel_shard_size": 2, "pipeline_model_parallel_size": 2},
            "'step' with pipeline stages",
        ),
        (
            {"reduce_gradients": "step", "data_parallel_shard_size": 2, "reduce_dtype": "bfloat16"},
            "'micro_batch' with reduce_dtype = 'bfloat16'",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.reduce_gradients is .*{message}"):
        ParallelConfig(**options)


def test_a_shared_update_has_as_many_operations_for_any_number_of_ranks() -> None:
    """It takes memory for what travels and no more, whether the parts are even, one is smaller, or some are empty."""
    counts = set()
    for ranks in (8, 64):
        parameters = {f"{rows}": torch.nn.Parameter(torch.ones(rows, 3)) for rows in (192, 130, 4)}
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        with fake_ranks(ranks):
            update = SharedUpdate(parameters, lambda _, ranks=ranks: (None, 0, ranks))
            bucket = ScatteredBucket(None, ranks, parameters=list(parameters.values()), places=update.places)
            with Recorder({}) as memory, Operations() as operations:
                memory.hold([(p, p.grad) for p in parameters.values()])
                held = memory.live
                bucket.start()
                part = 4 * sum(update.places[id(p)].each * 3 for p in parameters.values())
                assert memory.peak - held == (ranks + 1) * part
                bucket.finish()
                update.gather()
            counts.add(len(operations.found))
    assert len(counts) == 1


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7, 8])
def test_parts_of_all_ranks_are_the_parts_of_each(rows: int) -> None:
    """Of four ranks, of parts that are even, smaller or empty."""
    tensor = torch.arange(rows * 6.0).view(rows, 2, 3)
    places = [ShardOfParameter(rank, 4, 0, -(-rows // 4)) for rank in range(4)]
    all_ = torch.zeros(4, places[0].elements(tensor))
    for own, its in places[0].shared_with(tensor, all_):
        its.copy_(own)
    assert torch.equal(all_, torch.stack([place.filled_up(tensor) for place in places]))


def test_buckets_have_one_dtype_and_a_size() -> None:
    weights = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(3)]
    weights[1].main_grad = torch.zeros(4)
    found = list(filled(lambda: Bucket(None, 2), weights, limit=20))
    assert [bucket.parameters for bucket in found] == [[weights[0], weights[2]], [weights[1]]]


def test_a_gradient_that_grows_after_its_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would differ between ranks."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    weight = torch.nn.Parameter(torch.ones(2))
    buckets = InOrder([Bucket(None, 1, True, [weight])])
    buckets.watch()
    with buckets.last_backward():
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="have begun to average"):
            weight.sum().backward()
