"""The tables [checkpoint], [evaluation], [log] and [profile]: what a run writes, and when.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ConfigPart):
    """When the run saves; it always does at the end."""

    every: int = 0
    """Steps between two saves; 0: not by steps."""
    every_minutes: float = 10.0
    """Minutes after the last save from which on the next step saves; 0: not by time."""
    keep_last: int = 2
    """Newest checkpoints that are kept; 0: all."""
    async_save: bool = False
    """Whether a checkpoint is written while the next steps run, from a copy in main memory."""

    def _validate(self) -> None:
        minutes = self.every_minutes
        check(minutes >= 0, "checkpoint.every_minutes", minutes, "zero or a positive number")
        for name in ("every", "keep_last"):
            check(getattr(self, name) >= 0, f"checkpoint.{name}", getattr(self, name), "zero or a positive integer")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ConfigPart):
    """Measuring the validation loss."""

    every: int = 0
    """Steps between two measurements of the validation loss; 0: only at the end."""
    batches: int = 8
    """Validation batches of each rank, from each data set."""
    sets: tuple[str, ...] = ()
    """More validation data sets, as "name=folder": the metrics have the loss of each as validation_losses."""

    def folders(self) -> dict[str, str]:
        """Return the folders of `sets` by name."""
        found: dict[str, str] = {}
        for text in self.sets:
            name, _, folder = text.partition("=")
            check(bool(name and folder), "evaluation.sets", text, '"name=folder"')
            check(name not in found, "evaluation.sets", text, "each name once")
            found[name] = folder
        return found

    def _validate(self) -> None:
        self.folders()
        check(self.every >= 0, "evaluation.every", self.every, "zero or a positive integer")
        check(self.batches > 0, "evaluation.batches", self.batches, "a positive integer")


@dataclass(frozen=True, kw_only=True)
class LogConfig(ConfigPart):
    """What the run shows and records.

    `statistics_every` looks at the last micro-batch of those steps (amax, scale range, underflow, saturation; null: not
    finite), and costs nothing in others; a compiled run compiles a second graph for them.
    """

    progress: bool = True
    """Whether the run shows its progress and the time left: a bar on a terminal, elsewhere a line for each step."""
    every: int = 1
    """Steps between two lines of progress where standard error is no terminal; those with a validation loss, and the
    last one, are always shown."""
    plot: bool = False
    """Whether the run draws loss.png (extra plot)."""
    statistics_every: int = 0
    """Steps between two records of what quantization did to each operand, in the metrics; 0: none."""
    histogram_interval: int = 0
    """Steps between two records of expert_tokens, the load of each expert, and of what statistics_every records, which
    writers show as histograms; 0: none."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Dashboards that get the rows of metrics.jsonl, too: "tensorboard" (its extra) in OUTPUT_DIR/tensorboard, "wandb"
    (its extra)."""
    wandb_project: str = "te_models"
    """Project of the run in W&B, where it has the name of output_dir."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Whether W&B gets the rows at once, or OUTPUT_DIR/wandb keeps them for `wandb sync`."""
    peak_tflops: float | None = None
    """Dense bfloat16 peak of one device, in TFLOP/s: with it the metrics have `mfu`; unset: they do not."""

    def _validate(self) -> None:
        peak = self.peak_tflops
        check(peak is None or peak > 0, "log.peak_tflops", peak, "a positive number or null")
        check(self.every >= 1, "log.every", self.every, "a positive integer")
        for name in ("statistics_every", "histogram_interval"):
            check(getattr(self, name) >= 0, f"log.{name}", getattr(self, name), "zero or a positive integer")
        check(len({*self.writers}) == len(self.writers), "log.writers", list(self.writers), "each name once")
        check(bool(self.wandb_project), "log.wandb_project", self.wandb_project, "a name")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(ConfigPart):
    """A trace of some steps by torch.profiler, for chrome://tracing or Perfetto: a file of each rank."""

    start_step: int = 10
    """First step of the trace, counted from 1; the steps before it compile and warm up."""
    num_steps: int = 0
    """Steps of the trace; 0: there is none."""
    folder: str | None = None
    """Folder of the traces; unset: OUTPUT_DIR/profile."""

    def _validate(self) -> None:
        check(self.start_step >= 1, "profile.start_step", self.start_step, "a positive integer")
        check(self.num_steps >= 0, "profile.num_steps", self.num_steps, "zero or a positive integer")
