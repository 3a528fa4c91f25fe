"""What is rehearsed: a training run cut down to short runs of a few windows, its data, and its model in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError, ModelConfig, check
from ..model import GPTModel
from ..training.build import build_model, resolve_device
from ..training.config import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    ParallelConfig,
    ProfileConfig,
    ScheduleConfig,
    TrainConfig,
)
from ..training.data.windows import Batch
from ..training.preflight import check_run
from ..training.ranks.data_parallel import Ranks
from ..training.ranks.layout import ONE_RANK
from ..training.run_data import RunData, open_data, training_windows, validation_batches, validation_windows
from .formats import USUAL, formats_of, plain

HELD_OUT = 4
"""Batches of which the held-out loss is the mean."""
_VALIDATION = 0.05
"""Part of the windows that is held out where the run itself holds none out."""
WEIGHTS = "weights"
"""The folder of the model after the first run in high precision, of a run that begins with random weights."""


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """How a rehearsal measures. ConfigError for a value that is not allowed.

    budget: the largest loss gap to bf16, in percent. formats: names of `formats.FORMATS` to choose from. layers: how
    many decoder layers are measured one by one, the first and the last among them; None: all. steps, seeds: of each
    short run, and how many there are. tokens: of a batch. variants: whether errors of operands are measured of the
    other options of the recipes, too.
    """

    budget: float = 0.5
    formats: tuple[str, ...] = USUAL
    layers: int | None = None
    steps: int = 10
    seeds: int = 3
    tokens: int = 512
    variants: bool = True

    def __post_init__(self) -> None:
        check(0 < self.budget < 100, "--budget", self.budget, "a percentage above 0 and below 100")
        check(self.layers is None or self.layers >= 1, "--layers", self.layers, "a positive integer")
        check(self.steps >= 1, "--steps", self.steps, "a positive integer")
        check(3 <= self.seeds <= 100, "--seeds", self.seeds, "3 to 100")
        check(self.tokens >= 2, "--tokens", self.tokens, "at least 2")
        formats_of(self.formats)


def shortened(config: TrainConfig, options: RehearsalOptions) -> TrainConfig:
    """Return the configuration of a short run in high precision. ConfigError for a run that is not rehearsed: pairs,
    and adapters, whose weights stay as they are."""
    method, rank = config.posttraining.method, config.lora.rank
    if method != "none":
        raise ConfigError(f"posttraining.method is {method!r}; allowed in a rehearsal: 'none'")
    if rank:
        raise ConfigError(f"lora.rank is {rank}; allowed in a rehearsal: 0, because it trains the weights themselves")
    length = min(config.data.sequence_length, options.tokens)
    data = config.data.replace(
        sequence_length=length,
        micro_batch_size=max(1, options.tokens // length),
        gradient_accumulation=1,
        rampup_batch_size=(),
        prefetch=0,
        validation_fraction=config.data.validation_fraction or _VALIDATION,
    )
    # the run's own warm-up would outlast so few steps; from random weights a rate that stays leaves the last loss noisy
    kind = "constant" if config.model.path is not None else "linear"
    schedule = ScheduleConfig(kind=kind, warmup_steps=max(1, options.steps // 4), min_lr_ratio=0.1)
    return config.replace(
        steps=options.steps,
        compile=False,
        compile_mode="whole",
        resume=True,
        resume_from=None,
        data=data,
        schedule=schedule,
        precision=plain(config.precision),
        parallel=ParallelConfig(),
        optimizer=config.optimizer.replace(ema_decay=None),
        checkpoint=CheckpointConfig(),
        evaluation=EvaluationConfig(every=1, batches=HELD_OUT),
        log=LogConfig(progress=False),
        profile=ProfileConfig(),
    )


class Setting:
    """A run cut short, with its data open. Raises what `te-models train` raises for a run that cannot be."""

    def __init__(self, config: TrainConfig, options: RehearsalOptions) -> None:
        self.original, self.options = config, options
        self.device = resolve_device(config.device)
        self.config = shortened(config, options)
        self.model_config: ModelConfig
        self.model_config, _ = check_run(self.config, None, None, self.device, ONE_RANK.dims, reads_text=True)
        self.data: RunData = open_data(self.config, vocab_size=self.model_config.vocab_size, may_build=True)
        self.digest = self.data.checked_digest()
        self.config = self.config.replace(model=self.config.model.replace(verify=False))  # `check_run` has looked
        parts = validation_windows(self.config, self.data)[""]
        size = min(self.config.data.micro_batch_size, sum(map(len, parts)))
        smaller = self.config.replace(data=self.config.data.replace(micro_batch_size=size))
        self.held_out = validation_batches(smaller, parts, Ranks()).batches

    @property
    def is_random(self) -> bool:
        """Whether the run begins with random weights, on which errors say little."""
        return self.config.model.path is None

    def of_seed(self, seed: int) -> TrainConfig:
        """Return the short run with the seed at this distance from the configuration's."""
        return self.config.replace(seed=self.config.seed + seed)

    def batches(self, seed: int) -> Callable[[int], Batch]:
        """Return the training batches of a seed by step."""
        config = self.of_seed(seed)
        windows, size = training_windows(config, self.data), config.data.micro_batch_size
        return lambda step: windows.examples(step * size, size)

    def wide_model(self, folder: Path) -> GPTModel:
        """Return the model that errors are measured on, in float32: of `model.path`, or of WEIGHTS in `folder`."""
        precision = self.config.precision.replace(dtype="fp32")
        source = (
            self.config.model
            if not self.is_random
            else self.config.model.replace(path=str(folder / WEIGHTS), config=None, config_file=None, name=None)
        )
        model = build_model(self.config.replace(model=source, precision=precision), self.device, None)
        return model.requires_grad_(True)

    def operand_dtype(self) -> torch.dtype:
        """Return the dtype of the operands before they are quantized."""
        return torch.float32 if self.config.precision.dtype == "fp32" else torch.bfloat16

    def depends_on(self) -> dict[str, Any]:
        """Return what every measured part depends on, as a JSON value."""
        config = self.config.replace(output_dir="").to_dict()
        files = []
        if self.config.model.path is not None:
            for file in sorted(Path(self.config.model.path).iterdir()):
                status = file.stat()
                files.append([file.name, status.st_size, status.st_mtime_ns])
        return {**config, "tokens of the data": self.digest, "files of the model": files, "device": self.device}
