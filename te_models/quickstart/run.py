"""What the steps of the quickstart share: folders, model, text, sizes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .report import QuickstartReport


@dataclass(frozen=True, kw_only=True)
class QuickstartSizes:
    """How much of everything, chosen so that the whole ends within six minutes on two cores, in 6 GiB.

    The compared text is `windows` held-out files of `length` tokens each. `most_perplexity` is what a sane model stays
    below there. Training reads `train_batches` batches `epochs` times, `windows_per_file` windows from each text file;
    a machine that multiplies at less than `full_gflops` reads fewer, down to `fewest_batches` (pace.py). The loss on
    the last `compared` batches is compared with the untrained model's loss on the very same batches, so that the
    difference between batches does not hide what is learned; it must be below `most_loss` times as much. Each batch is
    read once: read again, it would be known. `compile`: whether training is compiled.
    """

    windows: int
    length: int
    most_perplexity: float
    train_batches: int
    fewest_batches: int
    full_gflops: float
    windows_per_file: int
    epochs: int
    compared: int
    train_length: int
    train_batch: int
    learning_rate: float
    most_loss: float
    new_tokens: int = 40
    experts: int = 4
    topk: int = 2
    compile: bool = True


REAL = QuickstartSizes(
    windows=4,
    length=256,
    most_perplexity=30.0,
    train_batches=32,
    fewest_batches=12,
    full_gflops=500.0,
    windows_per_file=1,
    epochs=1,
    compared=8,
    train_length=256,
    train_batch=1,
    learning_rate=2e-4,
    most_loss=0.99,
)
TINY = QuickstartSizes(
    windows=8,
    length=128,
    most_perplexity=300.0,
    train_batches=64,
    fewest_batches=64,
    full_gflops=500.0,
    windows_per_file=4,
    epochs=1,
    compared=16,
    train_length=128,
    train_batch=8,
    learning_rate=1e-3,
    most_loss=0.99,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the quickstart. `hf` is the source model folder; `scratch` is removed at the end."""

    out: Path
    scratch: Path
    hf: Path
    sizes: QuickstartSizes
    recipe: str
    tokenizer: Any
    windows: torch.Tensor
    training_files: list[Path]
    report: QuickstartReport

    @property
    def progress(self) -> bool:
        """Whether a person watches."""
        return self.report.verbose and sys.stderr.isatty()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self.tokenizer)

    @property
    def model(self) -> Path:
        """The imported dense model."""
        return self.out / "model"

    @property
    def moe(self) -> Path:
        """The mixture of experts made from it."""
        return self.out / "moe"


def steps_done(folder: Path) -> str:
    """Return how far the training run of a folder is: "step 12", or "before the first step"."""
    file = folder / "metrics.jsonl"
    steps = file.read_bytes().count(b"\n") if file.is_file() else 0
    return f"step {steps}" if steps else "before the first step"
