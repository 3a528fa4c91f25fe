"""The tables [checkpoint], [evaluation], [log] and [profile]: what a run writes, and when.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

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
    """Validation batches of all ranks together, from each data set."""
    sets: tuple[str, ...] = ()
    """More validation data sets, as "name=folder": the metrics have the loss of each as validation_losses."""

    functions: tuple[str, ...] = ()
    """Installed functions of the model, as "name=package.module:function": what they return, a number or numbers by
    name, is measured where the validation loss is, and the metrics have it as evaluations."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness (extra eval) that are measured with them, on one rank."""
    task_limit: int | None = 100
    """Documents of each task; null: all."""
    task_folder: str | None = None
    """Folder of YAML files with tasks beside the harness's."""

    def folders(self) -> dict[str, str]:
        """Return the folders of `sets` by name."""
        return _by_name("evaluation.sets", self.sets, '"name=folder"')

    def named_functions(self) -> dict[str, str]:
        """Return `functions` by name."""
        return _by_name("evaluation.functions", self.functions, '"name=package.module:function"')

    @property
    def measures_more(self) -> bool:
        """Whether something but the validation loss is measured."""
        return bool(self.functions or self.tasks)

    def _validate(self) -> None:
        self.folders()
        named = self.named_functions()
        check("tasks" not in named, "evaluation.functions", list(self.functions), "names other than tasks")
        check(len({*self.tasks}) == len(self.tasks), "evaluation.tasks", list(self.tasks), "each task once")
        limit = self.task_limit
        check(limit is None or limit > 0, "evaluation.task_limit", limit, "a positive integer or null")
        check(self.every >= 0, "evaluation.every", self.every, "zero or a positive integer")
        check(self.batches > 0, "evaluation.batches", self.batches, "a positive integer")


def _by_name(key: str, texts: tuple[str, ...], form: str) -> dict[str, str]:
    """Return what texts such as "name=value" say."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        check(bool(name and value), key, text, form)
        check(name not in found, key, text, "each name once")
        found[name] = value
    return found


@dataclass(frozen=True, kw_only=True)
class HubConfig(ConfigPart):
    """Uploading the result to the Hugging Face hub, with a model card of the run's facts."""

    repo_id: str | None = None
    """Repository, as "organisation/name", that the final model is uploaded to when the run is complete."""
    private: bool = True
    """Whether a repository that is made is private."""
    revision: str | None = None
    """Branch that is uploaded to; unset: the main one."""

    def _validate(self) -> None:
        where = self.repo_id
        check(where is None or 0 < len(where.strip("/")) == len(where), "hub.repo_id", where, "organisation/name")
        check(where is not None or self.revision is None, "hub.revision", self.revision, "unset without hub.repo_id")


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
    """Steps between two records of expert_tokens, the load of each expert, and of what statistics_every records;
    writers show both as histograms; 0: none."""
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
