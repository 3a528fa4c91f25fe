"""Gradients are reduced once a step, in buckets while the backward pass runs, and are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_models.config import ConfigError
from te_models.training import ParallelConfig
from te_models.training.ranks.buckets import Bucket, InOrder, filled
from tests.ranks import outcomes_on_ranks
from tests.training.ranks.reduction_ranks import cases

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
EVERYDAY = ("sharded equal whole", "sharded dense fp32", "whole dense bf16")
MODULE = "tests.training.ranks.reduction_ranks"


@pytest.mark.parametrize("names", [EVERYDAY, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
def test_reduced_once_they_are_the_same(names: tuple[str, ...] | None, tmp_path: Path) -> None:
    found = outcomes_on_ranks(MODULE, tmp_path / "outcomes", only=names or cases(tmp_path), timeout=400)
    for outcomes in found:
        assert outcomes == dict.fromkeys(outcomes, "ok"), "\n".join(outcomes.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_gradients": "micro_batch"}, "'step' with data_parallel_shard_size = 1"),
        (
            {
                "reduce_gradients": "micro_batch",
                "data_parallel_shard_size": 2,
                "pipeline_model_parallel_size": 2,
            },
            "'step' with pipeline stages",
        ),
        (
            {"reduce_gradients": "step", "data_parallel_shard_size": 2, "reduce_dtype": "bfloat16"},
            "'micro_batch' with reduce_dtype = 'bfloat16'",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=f"parallel.reduce_gradients is .*{message}"):
        ParallelConfig(**options)


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
