"""Models in products of layouts are saved as one rank saves them, on four gloo ranks; the cases are in
product_saving_ranks."""

from __future__ import annotations

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch is built without distributed or gloo", allow_module_level=True)

from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.product_saving_ranks import CASES, RANKS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on each rank."""
    results = tmp_path_factory.mktemp("products") / "results"
    return outcomes_on_ranks(
        "tests.te_models.product_saving_ranks", results, ranks=RANKS, only=selected(request, "case"), timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "memory"])
def test_four_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok"] * RANKS
