"""Step 4: train the mixture of experts in bf16 and under an FP8 recipe, compiled, on the same batches."""

from __future__ import annotations

import gc
import math
import shutil
import statistics
from pathlib import Path

import torch

from ..memory import return_freed_memory
from ..training import TokenDataset, TrainConfig, Windows, read_metrics, train, write_dataset
from .compare import ours, perplexity
from .curves import plot_curves
from .run import Run
from .text import windows_of


def run(run: Run) -> Path:
    """Train both; return the folder of the FP8 run's model."""
    report, sizes = run.report, run.sizes
    count, per_file = sizes.train_batches * sizes.train_batch, sizes.windows_per_file
    text = windows_of(run.tokenizer, run.training_files, count // per_file, per_file * sizes.train_length)
    dataset = write_dataset(run.scratch / "tokens", [[text.flatten().tolist()]], run.vocab_size)
    before = perplexity(ours(run.moe, run.windows, torch.bfloat16), run.windows)
    compared = _last_batches(run, dataset)
    first = math.log(perplexity(ours(run.moe, compared, torch.bfloat16), compared))
    report.numbers |= {"perplexity_before_training": before, "loss_before_training": first}
    curves = {name: run.out / f"train-{name}" for name in ("bf16", run.recipe)}
    last: dict[str, float] = {}
    for name, folder in curves.items():
        report.say(f"  training in {name}: {sizes.train_batches} batches, each read {_times(sizes.epochs)}")
        train(train_config(run, folder, "none" if name == "bf16" else name))
        _release()
        shutil.rmtree(folder / "checkpoints")  # gigabytes of optimizer state that nobody will continue from
        losses = [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]
        last[name] = statistics.fmean(losses[-sizes.compared :])
        report.numbers[f"loss_{name}"] = losses
        what = f"{name}: mean loss on the last {sizes.compared} batches, from {first:.4g} before training"
        report.at_most(what, last[name], sizes.most_loss * first, 4)
        after = perplexity(ours(folder / "final", run.windows, torch.bfloat16), run.windows)
        report.numbers[f"perplexity_after_{name}"] = after
        report.at_most(f"{name}: perplexity on held-out text, from {before:.4g}", after, before, 4)
    plot_curves({name: report.numbers[f"loss_{name}"] for name in curves}, sizes.compared, run.out / "curves.png")
    gap = abs(last[run.recipe] / last["bf16"] - 1)
    report.at_most(f"loss of {run.recipe} against bf16 on the last batches, relative", gap, 0.05)
    return curves[run.recipe] / "final"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _last_batches(run: Run, dataset: TokenDataset) -> torch.Tensor:
    """Return the windows [B, S] of the last `compared` steps, as the trainer will read them."""
    sizes, seed = run.sizes, train_config(run, run.out, "none").seed
    read, last = sizes.epochs * sizes.train_batches, sizes.compared
    windows = Windows(dataset, sizes.train_length, "train", 0.0, seed)
    return windows.batch((read - last) * sizes.train_batch, last * sizes.train_batch)


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
            # Moments in bfloat16, rounded stochastically, are half of the memory that AdamW needs here.
            "optimizer": {"lr": sizes.learning_rate, "moment_dtype": "bfloat16"},
            "schedule": {"kind": "wsd", "warmup_steps": min(4, steps // 4), "decay_steps": steps // 3},
            "precision": {"dtype": "bf16", "recipe": recipe},
            # A few dozen steps do not earn back the minutes that a graph of thirty layers takes to compile.
            "compile_mode": "block",
            "log": {"progress": run.progress},
        }
    )
