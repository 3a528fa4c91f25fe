"""`model.loss_chunk_tokens`: a run whose loss is computed from few logits at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_models import ConfigError
from te_models.model import output
from te_models.training import ModelSource, train
from tests.training.runs import curve, tiny_model, tiny_run


def test_a_run_in_chunks_is_the_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = output.linear_cross_entropy
    monkeypatch.setattr(
        output, "linear_cross_entropy", lambda *args, **k: (seen.append(k["chunk_tokens"]), plain(*args, **k))[1]
    )
    whole = tiny_run(tmp_path, "whole", steps=2)
    chunks = tiny_run(tmp_path, "chunks", steps=2, model=ModelSource(config=tiny_model(), loss_chunk_tokens=24))
    train(whole)
    assert set(seen) == {None}
    seen.clear()
    train(chunks)
    assert set(seen) == {24}
    for a, b in zip(curve(whole), curve(chunks), strict=True):
        assert b[1] == pytest.approx(a[1], rel=1e-5)


def test_no_tokens_at_a_time_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss_chunk_tokens is 0; allowed: a positive integer or null"):
        ModelSource(config=tiny_model(), loss_chunk_tokens=0)
