"""Runs of a small model of bytes, whose choices benchmarks compare: the same data and weights for each seed."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.recipe_gap import T_95
from te_models import GPTModel
from te_models.checkpoints.tools.quantize import quantizer_named
from te_models.config import AttentionConfig, MLPConfig, ModelConfig
from te_models.quickstart.text import library_files
from te_models.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelSource,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
    read_metrics,
    train,
)
from te_models.training.loop import evaluate_model
from te_models.training.precision import RoundedWeights
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.run_data import open_data, validation_batches, validation_windows
from te_models.training.step import make_loss_function

SEEDS = (0, 1, 2)
STEPS, EVERY = 200, 40
MODEL = ModelConfig(
    vocab_size=257,
    hidden_size=128,
    num_layers=2,
    max_position_embeddings=128,
    init_method_std=1 / math.sqrt(128),
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
    mlp=MLPConfig(ffn_hidden_size=384),
)


def small_run(name: str, seed: int, **changes: Any) -> TrainConfig:
    """Return a run of a benchmark, in a scratch folder where what was trained before is found again."""
    scratch = Path(tempfile.gettempdir()) / "te_models_small_runs"
    values: dict[str, Any] = {
        "output_dir": str(scratch / f"{name}-{seed}"),
        "steps": STEPS,
        "seed": seed,
        "device": "cpu",
        "compile": False,
        "model": ModelSource(config=MODEL),
        "data": DataConfig(
            path=str(scratch / "data"),
            text=tuple(map(str, library_files()[0][:60])),
            tokenizer="bytes",
            sequence_length=64,
            micro_batch_size=8,
            validation_fraction=0.1,
        ),
        "schedule": ScheduleConfig(kind="cosine", warmup_steps=20),
        "precision": PrecisionConfig(dtype="bf16-mixed"),
        "checkpoint": CheckpointConfig(every=0, keep_last=1),
        "evaluation": EvaluationConfig(every=EVERY, batches=4),
        "log": LogConfig(progress=False),
    }
    return TrainConfig(**(values | changes))


def validation_curve(config: TrainConfig) -> list[float]:
    """Train a run, unless it has been, and return its validation loss every EVERY steps."""
    folder = Path(config.output_dir)
    if not (folder / "final").exists():
        train(config)
    return [row["validation_loss"] for row in read_metrics(folder / "metrics.jsonl") if "validation_loss" in row]


def loss_of_rounded(config: TrainConfig, quantizer: str) -> float:
    """Return the validation loss of a trained run with its weights rounded as a folder stores them."""
    model = GPTModel.from_pretrained(Path(config.output_dir) / "final")
    parts = validation_windows(config, open_data(config, vocab_size=MODEL.vocab_size, may_build=False))
    loss_function = make_loss_function(model, config.precision, "cpu", compiled=False)
    batches = validation_batches(config, parts[""], Ranks(), "")
    with RoundedWeights(model, quantizer_named(quantizer)).in_force():
        return evaluate_model(model, loss_function, batches, "cpu", Ranks())


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the values of the seeds, their mean and the half-width of its 95 % interval."""
    width = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    seeds = [round(value, 4) for value in values]
    return {"seeds": seeds, "mean": round(statistics.fmean(values), 4), "interval_95": round(width, 4)}
