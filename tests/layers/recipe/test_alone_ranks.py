"""What one rank does alone under delayed scaling waits for no other rank, and changes nothing of the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.layers.alone_ranks import CASES
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


@pytest.mark.parametrize(
    "backend", ["none", *(pytest.param(b, marks=pytest.mark.slow) for b in ("eager", "aot_eager"))]
)
def test_a_rank_may_do_something_alone(tmp_path: Path, backend: str) -> None:
    results = tmp_path / "results"
    run_on_ranks(["-m", "tests.layers.alone_ranks", str(results), backend], timeout=240)
    first, second = (load_file(results.with_suffix(f".{rank}")) for rank in range(2))
    assert len(first) == (2 if backend == "none" else 4) * len(CASES)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} is not the same on both ranks"
        # three steps on equal data: whatever happened in between, and however it ran, left no trace
        assert torch.equal(value, first[f"another recipe/eager/{name.rpartition('/')[2]}"]), name
    newest = first["evaluate/eager/histories"][:, 0, 0, 0]
    assert 0 < float(newest.max()) < 1000, "an amax of the evaluation reached the history"
