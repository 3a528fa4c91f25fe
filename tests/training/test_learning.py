"""Tiny dense and MoE models learn real text (this Python's own sources, as bytes) in every number format."""

import math
from pathlib import Path

import pytest
import torch

import te_models
from te_models.training import CheckpointConfig, PrecisionConfig, ScheduleConfig, TokenDataset, train
from te_models.training import read_metrics as rows_of
from tests.training.runs import tiny_run

FORMATS = [
    *(("bf16", "none", False), ("bf16", "current", False), ("bf16", "block", False), ("bf16", "mxfp8", False)),
    *(("fp32", "none", False), ("bf16-mixed", "none", False), ("bf16-mixed", "mxfp8", False)),
    *(("bf16", "current", True), ("bf16", "block", True), ("bf16", "mxfp8", True)),
]
EVERY_TIME = {("fp32", "none", False, True), ("bf16", "mxfp8", False, False)}
CASES = [
    pytest.param(
        *case,
        id=f"{dtype}-{recipe}-{'stored' if quantized else 'plain'}-{'moe' if moe else 'dense'}",
        marks=() if case in EVERY_TIME else pytest.mark.slow,
    )
    for dtype, recipe, quantized in FORMATS
    for moe in (False, True)
    for case in [(dtype, recipe, quantized, moe)]
]


@pytest.mark.sentinels("fp32-none-plain-moe")
@pytest.mark.parametrize(("dtype", "recipe", "quantized", "moe"), CASES)
def test_the_loss_falls(tmp_path: Path, dtype: str, recipe: str, quantized: bool, moe: bool) -> None:
    """From a guess (the logarithm of the vocabulary) to well below the entropy of single bytes, on held-out text."""
    config = tiny_run(
        tmp_path,
        moe=moe,
        steps=50,
        schedule=ScheduleConfig(kind="wsd", warmup_steps=5, decay_steps=15),
        precision=PrecisionConfig(dtype=dtype, recipe=recipe, quantized_weights=quantized),
        checkpoint=CheckpointConfig(every=0),
    )
    sizes = {"sequence_length": 64, "micro_batch_size": 4, "gradient_accumulation": 1}
    config = config.replace(data=config.data.replace(validation_fraction=0.1, **sizes))
    result = train(config.replace(optimizer=config.optimizer.replace(lr=1e-2)))
    losses = [row["loss"] for row in rows_of(result.metrics_file)]
    assert losses[0] == pytest.approx(math.log(257), rel=0.03) and sum(losses[-10:]) / 10 < losses[0] - 2.0
    assert result.validation_loss is not None
    assert result.validation_loss < single_byte_entropy(tmp_path / "data") - 0.2
    model = te_models.GPTModel.from_pretrained(result.model_dir)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def single_byte_entropy(data: Path) -> float:
    """The loss in nats of the best model that ignores context."""
    counts = torch.bincount(TokenDataset.open(data).tokens.to(torch.int64)).double()
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())
