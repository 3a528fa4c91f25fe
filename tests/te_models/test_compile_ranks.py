"""compile_model on several ranks that see different shapes: the same graphs, no hang, the same parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

TRAINED = ("dense", "moe", "block", "late")


def outcomes(folder: Path, ranks: int, cases: str) -> list[dict[str, Any]]:
    """What every case came to, by rank."""
    results = folder / "results"
    run_on_ranks(["-m", "tests.te_models.compile_ranks_cases", cases, str(results)], ranks=ranks, timeout=400)
    return [json.loads(results.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]


def assert_alike(found: list[dict[str, Any]], case: str) -> None:
    """Every rank compiled the same graphs and ended with the same parameters."""
    first, *others = (outcome[case] for outcome in found)
    # the first shape, then one for all; in block mode the same of the layer and of the output layer
    assert len(first["graphs"]) == (4 if case == "block" else 2)
    for other in others:
        assert other == first


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes(tmp_path_factory.mktemp("two"), 2, ",".join(TRAINED))


@pytest.mark.parametrize("case", TRAINED)
def test_two_ranks_with_diverging_token_counts(case: str, two: list[dict[str, Any]]) -> None:
    """block: one rank has no tokens for two experts; late: one rank comes seconds later."""
    assert_alike(two, case)


def test_four_ranks_with_diverging_token_counts(tmp_path: Path) -> None:
    assert_alike(outcomes(tmp_path, 4, "moe"), "moe")


@pytest.mark.parametrize("case", ["desert", "absent"])
def test_a_timeout_names_the_missing_rank(case: str, tmp_path: Path) -> None:
    found = outcomes(tmp_path, 2, case)
    assert found[1][case]["error"] is None
    assert "rank 0 waited in vain to call a compiled model together with rank 1" in found[0][case]["error"]
