"""Attention layers whose ranks share each sequence give each rank its part of the whole sequences' result, and of the
gradients. On two gloo ranks; the cases are in context_parallel_ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch is built without distributed or gloo", allow_module_level=True)

from te_models.layers import apply_rotary_pos_emb
from tests.layers.attention.context_parallel_ranks import CASES
from tests.ranks import outcomes_on_ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("shared") / "results"
    return outcomes_on_ranks("tests.layers.attention.context_parallel_ranks", results, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """Two groups of keys, which ranks that exchange heads have twice."""
    outcomes = outcomes_on_ranks(
        "tests.layers.attention.context_parallel_ranks", tmp_path / "four", ranks=4, timeout=300
    )
    assert outcomes == [dict.fromkeys(CASES, "ok")] * 4


def test_positions_that_ranks_do_not_share() -> None:
    t, angles = torch.zeros(4, 1, 2, 4), torch.zeros(16, 1, 1, 4)
    with pytest.raises(ValueError, match="cp_rank is 2 and cp_size 2; allowed: a rank from 0 to cp_size - 1"):
        apply_rotary_pos_emb(t, angles, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="cp_size is 2 with start_positions; allowed: 1"):
        apply_rotary_pos_emb(t, angles, start_positions=torch.zeros(1, dtype=torch.int64), cp_size=2)
    with pytest.raises(ValueError, match="freqs has 7 positions; allowed: at least 8"):
        apply_rotary_pos_emb(t, angles[:7], cp_size=2)
