"""Runs of models with layers that predict further tokens: the metrics have their loss, and they resume bit for bit."""

from pathlib import Path

import pytest

from te_models import GPTModel
from te_models.checkpoints import expected_tensors
from te_models.training import CheckpointConfig, ModelSource, PrecisionConfig, read_metrics, train
from tests.training.runs import curve, tiny_model, tiny_run


def test_learns_and_resumes(tmp_path: Path) -> None:
    model = ModelSource(config=tiny_model(hidden=32, layers=1).replace(mtp_num_layers=1))
    options = {"model": model, "precision": PrecisionConfig(dtype="bf16"), "checkpoint": CheckpointConfig(every=3)}
    config = tiny_run(tmp_path, "whole", steps=6, **options)
    result = train(config)
    rows = read_metrics(result.metrics_file)
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"] and rows[0]["mtp_loss"] == pytest.approx(5.55, abs=0.3)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[0]["aux_loss"] == 0
    train(tiny_run(tmp_path, "parts", steps=3, **options))
    train(tiny_run(tmp_path, "parts", steps=6, **options | {"schedule": config.schedule.replace(extend="replace")}))
    assert [row[0] for row in curve(tiny_run(tmp_path, "parts"))] == [1, 2, 3, 4, 5, 6]
    trained = GPTModel.from_pretrained(result.model_dir)
    assert dict(trained.named_parameters()).keys() == expected_tensors(trained.config).keys()
    assert trained.config.mtp_num_layers == 1
