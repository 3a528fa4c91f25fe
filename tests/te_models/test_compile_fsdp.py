"""Models sharded by FSDP2 and compiled block by block, on two gloo ranks; the cases are in fsdp_model_ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

FAST = ("dense-none-plain-shard", "moe-mxfp8-stored-shard", "one_process", "whole")
SLOW = tuple(
    case
    for kind in ("dense", "moe")
    for recipe, storage in (("none", "plain"), ("mxfp8", "plain"), ("mxfp8", "stored"), ("delayed", "plain"))
    for first in ("shard", "compile")
    for case in [f"{kind}-{recipe}-{storage}-{first}"]
    if case not in FAST
)
Outcomes = list[dict[str, str]]


def outcomes(folder: Path, cases: tuple[str, ...], timeout: float) -> Outcomes:
    """What every case came to, on either rank."""
    results = folder / "results"
    run_on_ranks(["-m", "tests.te_models.fsdp_model_ranks", ",".join(cases), str(results)], timeout=timeout)
    return [json.loads(results.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes(tmp_path_factory.mktemp("fsdp"), FAST, 600)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes(tmp_path_factory.mktemp("fsdp"), SLOW, 1800)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST)
def test_two_ranks(case: str, fast: Outcomes) -> None:
    assert [outcome[case] for outcome in fast] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_two_ranks_in_the_full_run(case: str, slow: Outcomes) -> None:
    assert [outcome[case] for outcome in slow] == ["ok", "ok"]
