"""Pages that speak of GPUs say what was not run on one, as long as no environment with one is recorded."""

from __future__ import annotations

import json

import pytest

from docs.generate import ROOT

PAGES = ("README.md", "docs/layers.md", "docs/training.md", "docs/parallel.md", "bench/gpu/__init__.py")
ROWS = json.loads((ROOT / "docs/support.json").read_text(encoding="utf-8"))
MEASURED = (ROOT / "bench/results/gpu.json").exists() or any(row["device"] != "CPU" for row in ROWS)


@pytest.mark.skipif(MEASURED, reason="something was run on a GPU: the pages say what, and this test has no more to say")
@pytest.mark.parametrize("page", PAGES)
def test_what_was_not_run_on_a_gpu_is_said(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert "not been run on a GPU" in text or "has been run on a GPU yet" in text
