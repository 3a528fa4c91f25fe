"""Writers of metrics: each gets every row of a run, on rank 0 alone. The metrics file is the first of them.

A run that continues from step N repeats the steps after it. Each writer sees to it that a step is shown once: the
metrics file is cut after N, TensorBoard is told to forget what comes later, and W&B, unable to forget, keeps the rows
that it has (the repeated ones equal them).
"""

import json
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

from te_models.checkpoints.io.atomic import replace_text
from te_models.checkpoints.io.strict_json import read_object

from ...config import ConfigError
from ...extras import require
from ..config import LogConfig, TrainConfig
from ..metrics import METRICS, MetricsError, MetricsFile, is_step, read_metrics
from .histograms import Histogram, histograms_of, scalars_of
from .starts import dotted_keys

TENSORBOARD, WANDB = "tensorboard", "wandb.json"
"""Where in a run's folder TensorBoard's events are, and what W&B knows of the run."""

_RESULTS = ("loss", "validation_loss", "grad_norm", "tokens_per_second")
"""Metrics whose last values TensorBoard shows beside the keys of a run."""
_NOT_COMPARED = ("output_dir", "resume", "resume_from", "checkpoint", "log", "profile")
"""Tables and keys that make no difference to what is trained."""


class MetricsWriter(Protocol):
    """What every row of the metrics goes to, in a `with` that ends with the run."""

    def write(self, row: dict[str, Any]) -> None:
        """Record the row of a finished step."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def check_writers(log: LogConfig) -> None:
    """Raise MissingExtraError where the package of a writer is absent."""
    for name in log.writers:
        require(name, name, feature=f"log.writers = {name}")


def open_writers(config: TrainConfig, output_dir: Path, step: int) -> list[MetricsWriter]:
    """Return the writers of a run that has finished `step` steps; called by rank 0.

    Raises MetricsError for a damaged metrics file, and ConfigError where a writer cannot begin."""
    rows = read_metrics(output_dir / METRICS)
    written = rows[-1]["step"] if rows else 0
    writers: list[MetricsWriter] = [MetricsFile(output_dir / METRICS, keep_steps=step)]
    for name in config.log.writers:
        if name == "tensorboard":
            writers.append(TensorBoardWriter(output_dir / TENSORBOARD, config, keep_steps=step))
        else:
            writers.append(WandbWriter(output_dir, config, keep_steps=step, written_steps=written))
    return writers


class TensorBoardWriter:
    """Event files of TensorBoard in a folder (extra `tensorboard`). keep_steps: how many steps have finished."""

    def __init__(self, folder: Path, config: TrainConfig, *, keep_steps: int) -> None:
        require("tensorboard", "tensorboard", feature="log.writers = tensorboard")
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        again = folder.exists()
        self._writer: Any = SummaryWriter(str(folder), purge_step=keep_steps + 1 if again else None, flush_secs=10)
        # Not `add_hparams`, because that makes a second run: the values of a tag are shown beside the keys of its run.
        *beginning, self._end = hparams(_compared(config), dict.fromkeys(_RESULTS, 0.0))
        if not again:
            self._writer.add_text("config", f"```json\n{config.to_json()}```", 0)
            for summary in beginning:
                self._writer.file_writer.add_summary(summary)

    def write(self, row: dict[str, Any]) -> None:
        """Record the scalars of a row, and its histograms where it has any."""
        for name, value in scalars_of(row).items():
            self._writer.add_scalar(name, value, row["step"])
        for name, histogram in histograms_of(row).items():
            self._add_histogram(name, histogram, row["step"])

    def _add_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        counts, edges = histogram
        centres = [(a + b) / 2 for a, b in pairwise(edges)]
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(n * x for n, x in zip(counts, centres, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(counts, centres, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._writer.file_writer.add_summary(self._end)
        self._writer.close()


def _compared(config: TrainConfig) -> dict[str, str | float | bool]:
    """Return the keys by which TensorBoard compares runs (HPARAMS), with values of the types that it knows."""
    values = {name: value for name, value in config.to_dict().items() if name not in _NOT_COMPARED}
    found: dict[str, str | float | bool] = {}
    for name, value in dotted_keys(values).items():
        found[name] = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return found


class WandbWriter:
    """A run of Weights & Biases (extra `wandb`), the same one again where a run continues.

    keep_steps: how many steps have finished. written_steps: the last step that was recorded before, perhaps a later
    one.
    """

    def __init__(self, output_dir: Path, config: TrainConfig, *, keep_steps: int, written_steps: int) -> None:
        self._wandb = require("wandb", "wandb", feature="log.writers = wandb")
        log, file = config.log, output_dir / WANDB
        known = {"id": uuid.uuid4().hex, "written_steps": 0}
        if keep_steps > 0 and file.is_file():
            known = read_object(file)
            if not isinstance(known.get("id"), str) or not is_step(known.get("written_steps")):
                raise MetricsError(f"{file} does not name a run of W&B; move it away to begin a new one")
            known["written_steps"] = max(known["written_steps"], written_steps)
        replace_text(file, json.dumps(known) + "\n")
        self._written: int = known["written_steps"]
        try:
            self._run = self._wandb.init(
                project=log.wandb_project,
                id=known["id"],
                name=output_dir.name,
                dir=str(output_dir),
                mode=log.wandb_mode,
                config=config.to_dict(),
                resume="allow" if log.wandb_mode == "online" else None,  # offline runs are joined by `wandb sync`
                settings=self._wandb.Settings(console="off"),
            )
        except self._wandb.Error as error:
            raise ConfigError(f"W&B does not begin: {error}; log.wandb_mode = 'offline' needs no account") from error

    def write(self, row: dict[str, Any]) -> None:
        """Record the scalars of a row, and its histograms where it has any."""
        if row["step"] <= self._written:
            return
        values: dict[str, Any] = dict(scalars_of(row))
        for name, (counts, edges) in histograms_of(row).items():
            values[name] = self._wandb.Histogram(np_histogram=(counts, edges))
        self._run.log(values, step=row["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._run.finish(exit_code=0 if error[0] is None else 1)
