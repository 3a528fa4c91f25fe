"""The state of FusedAdamW over FSDP2 goes through a distributed checkpoint, on two real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


def test_every_rank_gets_its_own_moments_back(tmp_path: Path) -> None:
    """In every dtype of moments, for equal, unequal and empty shards; FP8 ones not where their blocks are others."""
    results = tmp_path / "results"
    run_on_ranks(["-m", "tests.layers.sharded_optimizer_ranks", str(results)], timeout=300)
    for rank in range(2):
        outcomes = json.loads(results.with_suffix(f".{rank}").read_text())
        assert len(outcomes) == 11
        assert {case: outcome for case, outcome in outcomes.items() if outcome != "ok"} == {}
