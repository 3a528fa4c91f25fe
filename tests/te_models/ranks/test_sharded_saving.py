"""Models that FSDP2 shards are saved whole, on two gloo ranks; the cases are in sharded_saving_ranks."""

from __future__ import annotations

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch is built without distributed or gloo", allow_module_level=True)

from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.sharded_saving_ranks import CASES, OTHERS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("sharded") / "results"
    return outcomes_on_ranks(
        "tests.te_models.sharded_saving_ranks", results, only=selected(request, "case"), timeout=200
    )


@pytest.mark.costs(40)
@pytest.mark.sentinels(
    "dense-plain",
    "dense-mxfp8",
    "moe-plain-copies",
    "says_on_every_rank_that_it_cannot_write",
)
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]
