"""What each process of test_reduction does: `python -m tests.training.ranks.reduction_ranks RESULTS`, on two ranks."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_models.training import train
from te_models.training.ranks import buckets, reduction
from tests.ranks import report_cases
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_run

CALLS = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce") if hasattr(dist, name)]
"""Newer versions of torch call the first, older ones the second."""


class Counted:
    """Collectives of gradients, counted while a run goes on, and which of them ran inside a backward pass."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.inside = {"reduce_scatter": 0, "all_reduce": 0}, 0
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


def sharded(folder: Path, moe: bool, dtype: str, **sizes: int) -> None:
    """A step reduces once, and gives the numbers of whole parameters."""
    shards = {"data_parallel_shard_size": 2, **sizes}
    each, many = trained(folder, f"each {moe} {dtype}", moe=moe, dtype=dtype, reduce_gradients="micro_batch", **shards)
    once, few = trained(folder, f"once {moe} {dtype}", moe=moe, dtype=dtype, reduce_gradients="step", **shards)
    assert many.calls["reduce_scatter"] == 4 * few.calls["reduce_scatter"] > 0
    if dist.get_rank():
        return
    close = 2e-7 if dtype == "fp32" else 1e-3
    for row, right in zip(curve(once), curve(each), strict=True):
        assert row[1] == pytest.approx(right[1], rel=close)
        assert row[4] == pytest.approx(right[4], rel=10 * close)


def whole(folder: Path, moe: bool, dtype: str, **sizes: int) -> None:
    """Small buckets are summed while the backward pass runs, and one at the end gives the same bits."""
    one, late = trained(folder, f"one {moe} {dtype}", moe=moe, dtype=dtype, limit=2**40, **sizes)
    many, early = trained(folder, f"many {moe} {dtype}", moe=moe, dtype=dtype, limit=1, **sizes)
    assert late.calls["all_reduce"] < early.calls["all_reduce"] and early.inside > early.calls["all_reduce"] // 2
    if dist.get_rank() == 0:
        assert curve(many) == curve(one)
        assert_same_bits(tensors_under(Path(many.output_dir) / "final"), tensors_under(Path(one.output_dir) / "final"))


def same_as_whole(folder: Path) -> None:
    """Two numbers have one sum: sharded parameters, reduced once, equal whole ones bit for bit, but for the order in
    which a norm adds up, which would scale the gradients."""
    one, _ = trained(folder, "whole", clip_grad_norm=None)
    once, _ = trained(folder, "sharded", clip_grad_norm=None, data_parallel_shard_size=2, reduce_gradients="step")
    if dist.get_rank() == 0:
        assert [row[1] for row in curve(once)] == [row[1] for row in curve(one)]
        finals = (tensors_under(Path(run.output_dir) / "final") for run in (once, one))
        assert_same_bits(*finals)


def cases(folder: Path) -> dict[str, Any]:
    """Return the cases by name."""
    found: dict[str, Any] = {"sharded equal whole": partial(same_as_whole, folder)}
    for moe in (False, True):
        for dtype in ("fp32", "bf16"):
            kind = f"{'moe' if moe else 'dense'} {dtype}"
            found[f"sharded {kind}"] = partial(sharded, folder, moe, dtype)
            found[f"whole {kind}"] = partial(whole, folder / "whole", moe, dtype)
    found["whole experts"] = partial(whole, folder / "experts", True, "fp32", expert_model_parallel_size=2)
    found["split whole"] = partial(whole, folder / "cp", True, "fp32", context_parallel_size=2)
    return found


assert buckets.IN_FLIGHT > 1

if __name__ == "__main__":
    torch.set_num_threads(1)
    report_cases(cases(Path(sys.argv[1]).parent), sys.argv[1])
