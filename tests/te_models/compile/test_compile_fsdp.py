"""Models sharded by FSDP2 and compiled block by block, on two gloo ranks; the cases are in fsdp_model_ranks."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

CASES = (
    "one_process",
    "whole",
    *(
        f"{kind}-{recipe}-{storage}-{first}"
        for kind in ("dense", "moe")
        for recipe, storage in (("none", "plain"), ("mxfp8", "plain"), ("mxfp8", "stored"), ("delayed", "plain"))
        for first in ("shard", "compile")
    ),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("fsdp") / "results"
    return outcomes_on_ranks("tests.te_models.fsdp_model_ranks", results, ",".join(CASES), timeout=2400)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]
