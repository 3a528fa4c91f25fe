"""Shared experts that compute while rows of the others travel: each collective is waited for once, and the numbers are
those without. The cases are in overlap_ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
if torch.distributed.is_available():
    from tests.ranks import outcomes_on_ranks

CASES = ("moe_shared", "padded", "meanwhile")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks(ranks: int, tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks("tests.te_models.ranks.overlap_ranks", tmp_path / "r", ranks=ranks, timeout=300)
    assert outcomes == [dict.fromkeys(CASES, "ok")] * ranks
