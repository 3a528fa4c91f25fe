"""The training configuration: one frozen tree of values, read from a TOML file (`file`).

Why a tree of dataclasses and not a dictionary: every key is known, typed and checked before the first weight is
allocated, and a misspelt key is an error that names it rather than a default that silently wins. The tree shares its
base with `ModelConfig`, so dictionary and JSON round trips are exact; each checkpoint stores the whole configuration as
JSON.
"""

import json
from dataclasses import dataclass, field
from typing import Literal, Self

from ...config import ConfigPart, check
from ...layouts import Facts, check_layout_rules
from ...parallel.stage_layout import stages_of
from .optimizer import DiLoCoConfig, LoRAConfig, OptimizerConfig, ScheduleConfig
from .output import CheckpointConfig, EvaluationConfig, HubConfig, LogConfig, ProfileConfig
from .parallel import ParallelConfig
from .posttraining import PosttrainingConfig
from .precision import PrecisionConfig
from .source import DataConfig, ModelSource

_MOST_MINUTES = 7 * 24 * 60
_MOST_STEPS = 10**12


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigPart):
    """A whole training run.

    A damaged newest checkpoint is refused. `resume_from` is OUTPUT_DIR/checkpoints/step-00000100, or a checkpoint of
    another run with the same settings.
    """

    output_dir: str
    """Folder of the run: it receives checkpoints/, metrics.jsonl, loss.png and final/."""
    steps: int
    """Optimizer steps."""
    seed: int = 0
    """Seed of initial weights, data order and random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU where there is one."""
    backend: Literal["auto", "definition", "compiled"] = "auto"
    """What computes the operations that have C++ or Triton kernels of this package: auto takes these where they can be
    had (or what TE_MODELS_BACKEND says), definition plain torch, compiled is an error where C++ is missing."""
    compile: bool = True
    """Whether the model and its loss are compiled."""
    compile_mode: Literal["whole", "block"] = "whole"
    """What is compiled as one graph: the whole loss (fastest steps, long compile), or one layer that all equal
    layers share (for short runs)."""
    resume: bool = True
    """Whether the run continues from the newest checkpoint in output_dir; without it, a used output_dir is refused."""
    resume_from: str | None = None
    """Checkpoint to continue from instead of the newest; newer ones in output_dir are renamed."""
    deterministic: bool = True
    """Whether torch uses reproducible kernels only, so that two runs are equal bit for bit."""
    distributed_timeout_minutes: float = 10.0
    """Minutes after which a rank that does not answer ends the run on all ranks."""
    callbacks: tuple[str, ...] = ()
    """Installed callbacks of the run, as "package.module:name": a te_models.training.Callback, or a class or function
    without arguments that returns one."""
    model: ModelSource
    """Where the model comes from."""
    data: DataConfig
    """The token data set and the shape of a batch."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks share the model and the data."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW, or Muon for matrices."""
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    """Steps that ranks make alone, and the optimizer that joins them."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """LoRA instead of training the weights."""
    posttraining: PosttrainingConfig = field(default_factory=PosttrainingConfig)
    """What is learned instead of text, preference pairs, or beside it, what a teacher says."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate as a function of the step."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats and the recipe of the linear layers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run saves."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Measuring the validation loss."""
    log: LogConfig = field(default_factory=LogConfig)
    """What the run shows and records."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """A trace of some steps by torch.profiler."""
    hub: HubConfig = field(default_factory=HubConfig)
    """Uploading the result to the Hugging Face hub."""

    def _validate(self) -> None:
        check(0 < self.steps <= _MOST_STEPS, "steps", self.steps, f"a positive integer up to {_MOST_STEPS}")
        check(self.seed >= 0, "seed", self.seed, "zero or a positive integer")
        check(self.resume or self.resume_from is None, "resume_from", self.resume_from, "null where resume is off")
        minutes = self.distributed_timeout_minutes
        check(0 < minutes <= _MOST_MINUTES, "distributed_timeout_minutes", minutes, f"up to {_MOST_MINUTES}, a week")
        self.precision.check_schedule(self.steps)
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_steps or 0
        name, length = ("steps", self.steps) if self.schedule.steps is None else ("schedule.steps", self.schedule.steps)
        check(warmup + decay <= length, "schedule.warmup_steps", warmup, f"warm-up and decay within {name} = {length}")
        start, count = self.profile.start_step, self.profile.num_steps
        last = start + count - 1
        check(
            not count or last <= self.steps, "profile.num_steps", count, f"up to steps = {self.steps} from {start} on"
        )
        adapted, optimizer = self.lora.rank > 0, self.optimizer
        qat = self.precision.qat
        check(
            not adapted or qat == "none", "precision.qat", qat, "'none' with lora.rank, whose weights are not trained"
        )
        check(not (adapted and optimizer.freeze), "optimizer.freeze", list(optimizer.freeze), "none with lora.rank")
        check(
            not adapted or optimizer.ema_decay is None,
            "optimizer.ema_decay",
            optimizer.ema_decay,
            "null with lora.rank",
        )
        clip = optimizer.qk_clip_threshold
        check(clip is None or not adapted, "optimizer.qk_clip_threshold", clip, "null with lora.rank")
        by_block = self.compile and self.compile_mode == "block"
        where = "null with compile_mode = 'block', in which layers share a graph; or 'whole', or compile = false"
        check(clip is None or not by_block, "optimizer.qk_clip_threshold", clip, where)
        check(
            optimizer.kind != "schedule_free" or self.schedule.kind == "constant",
            "schedule.kind",
            self.schedule.kind,
            "'constant' with optimizer.kind = 'schedule_free', whose average takes the place of a decay",
        )
        has_validation = self.data.validation_fraction > 0 or bool(self.evaluation.sets)
        has_validation |= self.evaluation.measures_more
        check(
            has_validation or not self.evaluation.every,
            "evaluation.every",
            self.evaluation.every,
            "0 without validation data, functions or tasks",
        )
        every = self.diloco.inner_steps
        whole = not every or self.steps % every == 0
        check(whole, "steps", self.steps, f"a multiple of diloco.inner_steps = {every}")
        self._check_pairs()
        check_layout_rules(Facts.of_run(self, self.model.config, stages=stages_of(self.parallel)))

    @property
    def window_rows(self) -> int:
        """The rows of a window: the two answers of a preference pair, or one."""
        return 2 if self.posttraining.method == "dpo" else 1

    @property
    def micro_batch_tokens(self) -> int:
        """The tokens of a rank's micro-batch."""
        return self.data.micro_batch_size * self.data.sequence_length * self.window_rows

    def _check_pairs(self) -> None:
        """Raise ConfigError where text and method do not go together, and for what pairs are not trained with."""
        pairs, format = self.posttraining.method == "dpo", self.data.format
        where = "with posttraining.method = 'dpo'"
        check(
            pairs or format != "preference_pairs",
            "data.format",
            format,
            "another format, 'preference' for the chosen answers alone, or 'preference_pairs' " + where,
        )
        if not pairs:
            return
        if self.data.text:
            check(format == "preference_pairs", "data.format", format, f"'preference_pairs' {where}")
        for name in ("pack_documents", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            check(not getattr(self.data, name), f"data.{name}", True, f"false {where}: an answer is a row")
        check(not self.model.mtp, "model.mtp", True, f"false {where}")
        z = self.model.logits_z_loss_coeff
        check(z == 0, "model.logits_z_loss_coeff", z, f"0 {where}")

    def to_json(self) -> str:
        """Return indented JSON with sorted keys; `from_json` restores an equal value."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`."""
        return cls.from_dict(json.loads(text))
