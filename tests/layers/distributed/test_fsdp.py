"""FSDP2 over quantized primary weights, on two real processes: see `fsdp_ranks` for what each case does."""

from __future__ import annotations

import pytest
import torch

from tests.covering import selected
from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.layers.fsdp_ranks import cases

    CASES = list(cases())
else:
    CASES = []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("fsdp") / "results"
    return outcomes_on_ranks("tests.layers.fsdp_ranks", results, only=selected(request, "case"), timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]
