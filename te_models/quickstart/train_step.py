"""Step 4: train the mixture of experts in bf16 and under an FP8 recipe, compiled, on the same batches."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..training import TrainConfig, train
from ..training.metrics import plot_loss, read_metrics
from .run import Run


def run(run: Run) -> Path:
    """Train both; return the folder of the FP8 run's model."""
    report = run.report
    curves = {name: run.out / f"train-{name}" for name in ("bf16", run.recipe)}
    for name, folder in curves.items():
        train(train_config(run, folder, "none" if name == "bf16" else name))
        _check_curve(run, name, read_metrics(folder / "metrics.jsonl"))
    plot_loss({name: folder / "metrics.jsonl" for name, folder in curves.items()}, run.out / "curves.png")
    ends = {name: _ends(read_metrics(folder / "metrics.jsonl"))[1] for name, folder in curves.items()}
    gap = abs(ends[run.recipe] / ends["bf16"] - 1)
    report.at_most(f"loss of {run.recipe} against bf16 at the end, relative", gap, 0.05)
    return curves[run.recipe] / "final"


def train_config(run: Run, folder: Path, recipe: str) -> TrainConfig:
    """The configuration of one of the two runs; they differ in the recipe only."""
    sizes = run.sizes
    return TrainConfig.from_dict(
        {
            "output_dir": str(folder),
            "steps": sizes.train_steps,
            "model": {"path": str(run.moe)},
            "data": {
                "path": str(run.scratch / "tokens"),
                "text": [str(file) for file in run.training_files],
                "tokenizer": str(run.hf),
                "sequence_length": sizes.train_length,
                "micro_batch_size": sizes.train_batch,
            },
            "optimizer": {"lr": sizes.learning_rate},
            "schedule": {"kind": "wsd", "warmup_steps": 4, "decay_steps": 8},
            "precision": {"dtype": "bf16", "recipe": recipe},
        }
    )


def _check_curve(run: Run, name: str, rows: list[dict[str, Any]]) -> None:
    first, last = _ends(rows)
    run.report.numbers[f"loss_{name}"] = [row["loss"] for row in rows]
    run.report.at_most(f"{name}: loss after {len(rows)} steps, from {first:.4g}", last, first * 0.98, digits=4)


def _ends(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean loss of the first and of the last quarter of the run: single batches differ more than they improve."""
    quarter = max(1, len(rows) // 4)
    losses = [row["loss"] for row in rows]
    return statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])
