"""Fusible operations split over two ranks are the whole ones: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch

from tests.covering import selected
from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.layers.te.ops.split_ranks import CASES
else:
    CASES = {"none": None}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    results = tmp_path_factory.mktemp("split_operations") / "results"
    return outcomes_on_ranks("tests.layers.te.ops.split_ranks", results, only=selected(request, "case"), timeout=400)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if "compiled" in c else ()) for c in CASES])
def test_split_operations(outcomes: list[dict[str, str]], case: str) -> None:
    for rank in outcomes:
        assert rank[case] == "ok", rank[case]
