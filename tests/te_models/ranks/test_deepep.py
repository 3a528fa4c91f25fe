"""Tokens that travel by deep_ep: the logits and gradients of all-to-all, on two ranks and on four, with a stand-in for
the library; what it cannot do is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_models.parallel.sharding import shards_experts_apart
from tests.covering import selected
from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.te_models.ranks.deepep_ranks import CASES, FOUR_RANKS
else:
    CASES = FOUR_RANKS = ("none",)


def run(folder: Path, *cases: str, ranks: int = 2) -> list[dict[str, str]]:
    """Run the cases on so many ranks, return what each says of each case."""
    return outcomes_on_ranks("tests.te_models.ranks.deepep_ranks", folder / "results", *cases, ranks=ranks, timeout=300)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    return run(tmp_path_factory.mktemp("deepep"), *selected(request, "case"))


@pytest.mark.costs(30)
@pytest.mark.sentinels(
    "moe_shared-float32",
    "moe_biases-bfloat16",
    "top3-bfloat16",
    "dropping_on_input-float32",
    *(case for case in CASES if "-" not in case),
)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    found = [outcome[case] for outcome in outcomes]
    if case == "sharded" and not shards_experts_apart():
        assert all("data_parallel_shard_size = 1, or torch 2.13" in text for text in found), "it has to be refused"
        return
    assert found == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.costs(30)
def test_four_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, *FOUR_RANKS, ranks=4) == [dict.fromkeys(FOUR_RANKS, "ok")] * 4
