"""Layers split over two ranks compile to one graph, collectives included, and compute the same bits as eagerly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

FAST = ("linear_row-delayed-eager",)
"""Run on every change: collectives of sums, with scales of earlier calls."""

if torch.distributed.is_available():
    from tests.layers.compile_tensor_parallel_ranks import CASES
else:
    CASES = dict.fromkeys(FAST)
FULL = tuple(name for name in CASES if name not in FAST)


def outcomes(folder: Path, cases: tuple[str, ...]) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    return outcomes_on_ranks(
        "tests.layers.compile_tensor_parallel_ranks", folder / "results", ",".join(cases), timeout=120 + 60 * len(cases)
    )


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes(tmp_path_factory.mktemp("fast"), FAST)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes(tmp_path_factory.mktemp("full"), FULL)


@pytest.mark.costs(40)
@pytest.mark.parametrize("case", FAST)
def test_two_ranks(case: str, fast: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in fast] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL)
def test_two_ranks_in_the_full_run(case: str, full: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in full] == ["ok", "ok"]
