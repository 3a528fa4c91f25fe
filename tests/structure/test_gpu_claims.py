"""Pages that speak of GPUs say what was not run on one, as long as no environment with one is recorded."""

import json
import re

import pytest

from docs.generate import ROOT

ROWS = json.loads((ROOT / "docs/support.json").read_text(encoding="utf-8"))
MEASURED = [path.name for path in (ROOT / "bench/results").glob("*gpu*.json")] + [
    r for r in ROWS if r["device"] != "CPU"
]
SAID = re.compile(r"(not|has) been run on a GPU|not been run\]|no GPU has run|measured on a GPU", re.IGNORECASE)
OF_A_GPU = re.compile(r"\bGPUs?\b|CUDA|NCCL|accelerators?\b(?! as| gather)|sm_90", re.IGNORECASE)
EXEMPT = {"docs/cli.md", "docs/layout.md", "docs/model-keys.md", "docs/training-keys.md"}
"""Generated from help texts and docstrings."""


def pages() -> list[str]:
    """README, CONTRIBUTING and the pages of docs/ that speak of GPUs."""
    found = [ROOT / "README.md", ROOT / "bench/gpu/__init__.py", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [path for path in found if path.parent != ROOT / "docs/design"]  # its index says it for all of its pages
    return [p.relative_to(ROOT).as_posix() for p in found if OF_A_GPU.search(p.read_text(encoding="utf-8"))]


@pytest.mark.skipif(
    bool(MEASURED), reason="something was run on a GPU: the pages say what, and this test has no more to say"
)
def test_what_was_not_run_on_a_gpu_is_said() -> None:
    texts = {page: " ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in pages()}
    assert {"README.md", "docs/recipes.md", "docs/training.md", "docs/parallel.md"} <= set(texts)
    assert [page for page, text in texts.items() if page not in EXEMPT and not SAID.search(text)] == []
