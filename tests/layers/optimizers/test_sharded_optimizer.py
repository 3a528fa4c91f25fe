"""The state of FusedAdamW over FSDP2 goes through a distributed checkpoint, on two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


EVERYDAY = ["float32-256", "bfloat16-1", "float8-3", "other shards", "whole blocks"]


@pytest.mark.parametrize("only", [EVERYDAY, pytest.param(None, marks=pytest.mark.slow)], ids=["everyday", "all"])
def test_every_rank_gets_its_own_moments_back(only: list[str] | None, tmp_path: Path) -> None:
    """In every dtype of moments, for equal, unequal and empty shards; FP8 ones not where their blocks are others."""
    results = tmp_path / "results"
    for outcomes in outcomes_on_ranks("tests.layers.sharded_optimizer_ranks", results, only=only, timeout=300):
        assert len(outcomes) == (11 if only is None else len(only))
        assert {case: outcome for case, outcome in outcomes.items() if outcome != "ok"} == {}
