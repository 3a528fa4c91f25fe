"""Step 4: train the mixture of experts in bf16 and under an FP8 recipe, compiled, on the same batches."""

from __future__ import annotations

import gc
import shutil
import statistics
from pathlib import Path

import torch

from ..training import TrainConfig, read_metrics, train, write_dataset
from ..training.memory import return_freed_memory
from .compare import ours, perplexity
from .curves import plot_curves
from .run import Run
from .text import windows_of


def run(run: Run) -> Path:
    """Train both; return the folder of the FP8 run's model."""
    report, sizes = run.report, run.sizes
    batches = windows_of(run.tokenizer, run.training_files, sizes.train_batches * sizes.train_batch, sizes.train_length)
    write_dataset(run.scratch / "tokens", [[batches.flatten().tolist()]], run.vocab_size)
    before = perplexity(ours(run.moe, run.windows, torch.bfloat16), run.windows)
    report.numbers["perplexity_before_training"] = before
    curves = {name: run.out / f"train-{name}" for name in ("bf16", run.recipe)}
    last: dict[str, float] = {}
    for name, folder in curves.items():
        report.say(f"  training in {name}: {sizes.epochs} times {sizes.train_batches} batches")
        train(train_config(run, folder, "none" if name == "bf16" else name))
        _release()
        shutil.rmtree(folder / "checkpoints")  # gigabytes of optimizer state that nobody will continue from
        losses = [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]
        first, last[name] = (
            statistics.fmean(losses[: sizes.train_batches]),
            statistics.fmean(losses[-sizes.train_batches :]),
        )
        report.numbers[f"loss_{name}"] = losses
        report.at_most(
            f"{name}: mean loss of the last epoch, from {first:.4g} in the first", last[name], 0.97 * first, 4
        )
        after = perplexity(ours(folder / "final", run.windows, torch.bfloat16), run.windows)
        report.numbers[f"perplexity_after_{name}"] = after
        report.at_most(
            f"{name}: perplexity on held-out text, from {before:.4g}", after, sizes.most_held_out * before, 4
        )
    plot_curves({name: report.numbers[f"loss_{name}"] for name in curves}, sizes.train_batches, run.out / "curves.png")
    gap = abs(last[run.recipe] / last["bf16"] - 1)
    report.at_most(f"loss of {run.recipe} against bf16 in the last epoch, relative", gap, 0.05)
    return curves[run.recipe] / "final"


def _release() -> None:
    """Free the model that was trained: the compiler's caches would keep it alive beside the next one."""
    torch._dynamo.reset()
    gc.collect()
    return_freed_memory()


def train_config(run: Run, folder: Path, recipe: str) -> TrainConfig:
    """The configuration of one of the two runs; they differ in the recipe only."""
    sizes = run.sizes
    steps = sizes.train_batches * sizes.epochs
    return TrainConfig.from_dict(
        {
            "output_dir": str(folder),
            "steps": steps,
            "model": {"path": str(run.moe)},
            "data": {
                "path": str(run.scratch / "tokens"),
                "sequence_length": sizes.train_length,
                "micro_batch_size": sizes.train_batch,
                "validation_fraction": 0.0,
            },
            "optimizer": {"lr": sizes.learning_rate},
            "schedule": {"kind": "wsd", "warmup_steps": min(4, steps // 4), "decay_steps": steps // 3},
            "precision": {"dtype": "bf16", "recipe": recipe},
            # A few dozen steps do not earn back the minutes that a graph of thirty layers takes to compile.
            "compile_scope": "layers",
            "log": {"progress": run.progress},
        }
    )
