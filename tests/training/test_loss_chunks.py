"""`model.loss_chunk_tokens`: a run whose loss is computed from few logits at a time."""

import json
from pathlib import Path

import pytest

from te_models import ConfigError
from te_models.model import output
from te_models.training import ModelSource, ScheduleConfig, train
from te_models.training.config import source
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


@pytest.mark.parametrize(
    ("vocab_size", "tokens", "chunk"),
    [(32_767, 1 << 20, None), (32_768, 8192, None), (32_768, 8193, 1024), (151_936, 1024, None), (151_936, 2048, 1024)],
)
def test_a_run_bounds_its_logits_by_itself(vocab_size: int, tokens: int, chunk: int | None) -> None:
    """A large vocabulary, and logits of more than 1 GiB in float32."""
    assert ModelSource(config_file="x").loss_chunk(vocab_size, tokens) == chunk
    assert ModelSource(config_file="x", loss_chunk_tokens=7).loss_chunk(vocab_size, tokens) == 7
    assert ModelSource(config_file="x", loss_chunk_tokens=None).loss_chunk(vocab_size, tokens) is None


def test_a_continued_run_keeps_its_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose checkpoint says null, as those of earlier releases do, where it would be chosen now."""
    run = tiny_run(tmp_path, steps=1, schedule=ScheduleConfig(kind="constant"))
    train(run)
    file = max(Path(run.output_dir).glob("checkpoints/step-*")) / "training.json"
    assert json.loads(file.read_text())["config"]["model"]["loss_chunk_tokens"] is None
    monkeypatch.setattr(source, "_LARGE_VOCABULARY", 1)
    monkeypatch.setattr(source, "_LOGIT_BYTES", 0)
    train(run.replace(steps=2))
    other = tiny_run(tmp_path, "other", steps=1)
    train(other)
    found = [max(Path(r.output_dir).glob("checkpoints/step-*")) / "training.json" for r in (run, other)]
    chunks = [json.loads(file.read_text())["config"]["model"]["loss_chunk_tokens"] for file in found]
    assert chunks == [None, 1024]


def test_no_tokens_at_a_time_are_refused() -> None:
    with pytest.raises(ConfigError, match='loss_chunk_tokens is 0; allowed: a positive integer, "auto" or null'):
        ModelSource(config=tiny_model(), loss_chunk_tokens=0)
