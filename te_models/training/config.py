"""The training configuration: one frozen tree of values, read from a TOML file.

Why a tree of dataclasses and not a dictionary: every key is known, typed and checked before the first weight is
allocated, and a misspelt key is an error that names it rather than a default that silently wins. Overrides on the
command line go through tyro, which reads the same annotations. The tree shares its base with `ModelConfig`, so
dictionary and JSON round trips are exact; each checkpoint stores the whole configuration as JSON.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ..config import ConfigError, ConfigPart, ModelConfig, check

_MOST_MINUTES = 7 * 24 * 60
_MOST_STEPS = 10**12


@dataclass(frozen=True, kw_only=True)
class ModelSource(ConfigPart):
    """Where the model comes from: exactly one of `path`, `config` and `config_file`.

    `path` is a trained folder (ours or Hugging Face's). The other two are a random initialisation: the TOML table
    [model.config], or a JSON file of a ModelConfig. `activation_checkpointing` keeps only each layer's input for the
    backward pass and computes the rest again. `loss_chunk_tokens` computes the loss from the logits of so many tokens
    at a time, which bounds its memory; None: from those of all tokens.
    """

    path: str | None = None
    config: ModelConfig | None = None
    config_file: str | None = None
    expert_layout: Literal["grouped", "per-gemm"] = "grouped"
    activation_checkpointing: bool = False
    loss_chunk_tokens: int | None = None

    def _validate(self) -> None:
        given = [name for name in ("path", "config", "config_file") if getattr(self, name) is not None]
        check(len(given) == 1, "model", " and ".join(given) or "empty", "one of path, config and config_file")
        chunk = self.loss_chunk_tokens
        check(chunk is None or chunk > 0, "model.loss_chunk_tokens", chunk, "a positive integer or null")


@dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigPart):
    """The token data set and the shape of a batch.

    `path` is a token data set (`te_models.training.data.dataset`). If nothing is there yet it is built from `text`
    (file names or glob patterns) with `tokenizer` (a folder with tokenizer.json, or "bytes"). One optimizer step
    consumes `micro_batch_size * gradient_accumulation * ranks` windows of `sequence_length` tokens.
    """

    path: str
    text: tuple[str, ...] = ()
    tokenizer: str | None = None
    sequence_length: int = 1024
    micro_batch_size: int = 1
    gradient_accumulation: int = 1
    validation_fraction: float = 0.01

    def _validate(self) -> None:
        check(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2 tokens")
        for name in ("micro_batch_size", "gradient_accumulation"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a positive integer")
        check(0 <= self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "0 <= f < 1")
        both = bool(self.text) == (self.tokenizer is not None)
        check(both, "data.tokenizer", self.tokenizer, "set exactly when data.text is set")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ConfigPart):
    """AdamW (arXiv 1711.05101). One-dimensional parameters and biases are not decayed.

    `clip_grad_norm` None switches clipping off. `master_weights` keeps a float32 copy of parameters that are stored in
    fewer bits and updates that; quantized weights always have one, because an FP8 weight cannot absorb a small update.
    `accumulate_allreduce_grads_in_fp32`: add up the gradients of micro-batches, and of ranks, in float32 `main_grad`
    buffers, 4 bytes per parameter where parameters have fewer bits; there are none where a step is one micro-batch on
    one rank. Off, sums are rounded to the parameters' dtype each time.
    `moment_dtype` is how the two running averages are kept; the eight-bit one has a scale per 128 values, and the two
    short ones round stochastically. `skip_nonfinite`: a step whose gradient has an infinity or a NaN changes no weight,
    moment or master, is marked in the metrics, and training goes on; without it, training stops.
    `moe_router_bias_update_rate`: by how much a step moves the bias of each expert of a mixture with
    `moe.router.expert_bias` towards balance (0: not at all). A skipped step does not.
    """

    lr: float = 3e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad_norm: float | None = 1.0
    master_weights: bool = False
    moment_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    skip_nonfinite: bool = False
    moe_router_bias_update_rate: float = 1e-3
    accumulate_allreduce_grads_in_fp32: bool = True

    def _validate(self) -> None:
        check(self.lr > 0, "optimizer.lr", self.lr, "a positive number")
        betas = self.betas
        check(len(betas) == 2 and all(0 <= b < 1 for b in betas), "optimizer.betas", betas, "two numbers in [0, 1)")
        check(self.eps > 0, "optimizer.eps", self.eps, "a positive number")
        check(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "zero or a positive number")
        clip = self.clip_grad_norm
        check(clip is None or clip > 0, "optimizer.clip_grad_norm", clip, "a positive number or null")
        rate = self.moe_router_bias_update_rate
        check(rate >= 0, "optimizer.moe_router_bias_update_rate", rate, "zero or a positive number")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(ConfigPart):
    """The learning rate as a function of the step (`te_models.training.optimizer.schedule`).

    `decay_steps` is the length of the final decay of "wsd" (None: a tenth of the curve); "cosine" decays over all steps
    after the warm-up. `min_lr_ratio` times `optimizer.lr` is where both end. `steps` is the length of the curve (None:
    of the run); in steps after its end the learning rate stays where the curve ended.
    `extend` says which curve a run follows whose checkpoint was trained with another one (other `steps`, `schedule` or
    `optimizer.lr`): "hold" the checkpoint's, and after its end the rate that it ended with; "replace" the one that is
    configured now, from the first step on that is not trained yet. None: such a run is refused unless the two curves
    agree in every step that was trained.
    """

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr_ratio: float = 0.1
    steps: int | None = None
    extend: Literal["hold", "replace"] | None = None

    def _validate(self) -> None:
        check(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "zero or a positive integer")
        decay = self.decay_steps
        check(decay is None or self.kind == "wsd", "schedule.decay_steps", decay, "null unless schedule.kind is 'wsd'")
        check(decay is None or decay > 0, "schedule.decay_steps", decay, "a positive integer or null")
        check(0 <= self.min_lr_ratio <= 1, "schedule.min_lr_ratio", self.min_lr_ratio, "0 <= ratio <= 1")
        check(self.steps is None or self.steps > 0, "schedule.steps", self.steps, "a positive integer or null")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ConfigPart):
    """Number formats. `dtype`: "fp32", "bf16" (parameters and compute), "bf16-mixed" (fp32 parameters, bf16 compute).

    `recipe` is the recipe of the linear layers and `recipe_options` its fields, as "name=value" with a JSON value
    ("amax_history_len=16"), or True or False. `overrides` are "pattern=recipe" or "pattern=bf16" for layers whose name
    matches (a glob: * is anything, ? one character, [02] one of those); the first match wins. `first_layers_bf16` and
    `last_layers_bf16` leave whole layers at the ends of the decoder in high precision. `quantized_weights` stores the
    weights quantized as well. `cache_weights` quantizes each weight once per step and not in every micro-batch.
    """

    dtype: Literal["fp32", "bf16", "bf16-mixed"] = "bf16"
    recipe: Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"] = "none"
    recipe_options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    quantized_weights: bool = False
    cache_weights: bool = False

    def _validate(self) -> None:
        if self.recipe == "none":
            for name in ("recipe_options", "overrides", "first_layers_bf16", "last_layers_bf16"):
                value = getattr(self, name)
                check(not value, f"precision.{name}", value, "empty without a recipe")
            for name in ("quantized_weights", "cache_weights"):
                check(not getattr(self, name), f"precision.{name}", True, "false without a recipe")
        for name in ("first_layers_bf16", "last_layers_bf16"):
            check(getattr(self, name) >= 0, f"precision.{name}", getattr(self, name), "zero or a positive integer")
        for name in ("recipe_options", "overrides"):
            for text in getattr(self, name):
                check(
                    "=" in text,
                    f"precision.{name}",
                    text,
                    "name=value" if name == "recipe_options" else "pattern=recipe",
                )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ConfigPart):
    """Save every `every` steps (0: not by steps), in the first step that ends more than `every_minutes` after the last
    save (0: not by time), and at the end. Keep the newest `keep_last` (0: all)."""

    every: int = 0
    every_minutes: float = 10.0
    keep_last: int = 2

    def _validate(self) -> None:
        minutes = self.every_minutes
        check(minutes >= 0, "checkpoint.every_minutes", minutes, "zero or a positive number")
        for name in ("every", "keep_last"):
            check(getattr(self, name) >= 0, f"checkpoint.{name}", getattr(self, name), "zero or a positive integer")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ConfigPart):
    """Measure the loss on `batches` validation batches per rank every `every` steps (0: never) and at the end."""

    every: int = 0
    batches: int = 8

    def _validate(self) -> None:
        check(self.every >= 0, "evaluation.every", self.every, "zero or a positive integer")
        check(self.batches > 0, "evaluation.batches", self.batches, "a positive integer")


@dataclass(frozen=True, kw_only=True)
class LogConfig(ConfigPart):
    """`progress` shows a progress bar (extra `train`), `plot` writes loss.png (extra `plot`). `statistics_every` writes
    what quantization did to each operand (amax, scale range, underflow, saturation; null: not finite) into the metrics
    every so many steps, 0: never. It is looked at in the last micro-batch of those steps, and costs nothing in others;
    a compiled run compiles a second graph for them."""

    progress: bool = True
    plot: bool = False
    statistics_every: int = 0

    def _validate(self) -> None:
        check(self.statistics_every >= 0, "log.statistics_every", self.statistics_every, "zero or a positive integer")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigPart):
    """A whole training run. `output_dir` receives checkpoints/, metrics.jsonl, loss.png and final/.

    With `resume` the run continues from the newest checkpoint in `output_dir`, and refuses a damaged one; without it, a
    used `output_dir` is refused. `resume_from` names the checkpoint to continue from instead
    (OUTPUT_DIR/checkpoints/step-00000100, or one of another run with the same settings); newer ones in `output_dir` are
    renamed. `deterministic` asks torch for reproducible kernels only, so that two runs are equal bit for bit.
    `compile_mode` "whole" makes one graph of the whole loss: the fastest steps, and a compile time that grows with the
    number of layers. "block" compiles one layer, which all equal layers share: the choice for short runs.
    `expert_model_parallel_size` n gives each of n consecutive ranks 1/n of the experts. A rank that does not answer for
    `distributed_timeout_minutes` ends the run on all ranks.
    """

    output_dir: str
    steps: int
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = True
    compile_mode: Literal["whole", "block"] = "whole"
    resume: bool = True
    resume_from: str | None = None
    deterministic: bool = True
    expert_model_parallel_size: int = 1
    distributed_timeout_minutes: float = 10.0
    model: ModelSource
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def _validate(self) -> None:
        check(0 < self.steps <= _MOST_STEPS, "steps", self.steps, f"a positive integer up to {_MOST_STEPS}")
        check(self.seed >= 0, "seed", self.seed, "zero or a positive integer")
        check(self.resume or self.resume_from is None, "resume_from", self.resume_from, "null where resume is off")
        size = self.expert_model_parallel_size
        check(size > 0, "expert_model_parallel_size", size, "a positive integer")
        minutes = self.distributed_timeout_minutes
        check(0 < minutes <= _MOST_MINUTES, "distributed_timeout_minutes", minutes, f"up to {_MOST_MINUTES}, a week")
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_steps or 0
        name, length = ("steps", self.steps) if self.schedule.steps is None else ("schedule.steps", self.schedule.steps)
        check(warmup + decay <= length, "schedule.warmup_steps", warmup, f"warm-up and decay within {name} = {length}")
        has_validation = self.data.validation_fraction > 0
        check(
            has_validation or not self.evaluation.every,
            "evaluation.every",
            self.evaluation.every,
            "0 without validation data",
        )

    def to_json(self) -> str:
        """Return indented JSON with sorted keys; `from_json` restores an equal value."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`."""
        return cls.from_dict(json.loads(text))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply command-line overrides such as `["--optimizer.lr", "1e-4"]`.

    Raises ConfigError with one sentence for a missing file, malformed TOML, an unknown key or option, or a bad value.
    """
    from .overrides import apply_overrides

    return apply_overrides(parse_toml(Path(path)), overrides)


def parse_toml(path: Path) -> TrainConfig:
    """Read a TrainConfig from TOML; relative paths in it stay relative to the working directory."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the training configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return TrainConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
