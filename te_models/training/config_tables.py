"""The tables of the training configuration, one class each: what the keys are, and which values they may have.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..config import ConfigPart, ModelConfig, check
from ..parallel.dims import check_sizes


@dataclass(frozen=True, kw_only=True)
class ModelSource(ConfigPart):
    """Where the model comes from: exactly one of `path`, `config` and `config_file`. The last two are a random
    initialisation."""

    path: str | None = None
    """Folder of a trained model, te_models' or Hugging Face's."""
    config: ModelConfig | None = None
    """Configuration of a model with random weights."""
    config_file: str | None = None
    """JSON file of a ModelConfig, for a model with random weights."""
    expert_layout: Literal["grouped", "per-gemm"] = "grouped"
    """Whether the experts of a layer are one tensor (grouped) or one each."""
    activation_checkpointing: bool = False
    """Whether only the input of each layer is kept for the backward pass, which computes the rest again."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits the loss is computed from at a time, which bounds its memory; unset means all."""
    verify: bool = True
    """Whether the weights in path are checked against the digests of its manifest.json."""

    def _validate(self) -> None:
        present = [name for name in ("path", "config", "config_file") if getattr(self, name) is not None]
        check(len(present) == 1, "model", " and ".join(present) or "empty", "one of path, config and config_file")
        chunk = self.loss_chunk_tokens
        check(chunk is None or chunk > 0, "model.loss_chunk_tokens", chunk, "a positive integer or null")


@dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigPart):
    """The token data set and the shape of a batch.

    One optimizer step consumes `micro_batch_size * gradient_accumulation * ranks` windows of `sequence_length` tokens.
    """

    path: str | None = None
    """Folder of the token data set; built from text where it does not exist."""
    blend: tuple[str, ...] = ()
    """Folders of several token data sets in place of path, as "folder=weight": windows are read by weight."""
    text: tuple[str, ...] = ()
    """Files or glob patterns to build the data set from: text, .jsonl, .parquet, folders that datasets saved."""
    text_field: str = "text"
    """Field of .jsonl, or column of a table, that is the text of a document."""
    messages_field: str | None = None
    """Field that is a list of chat messages with role and content, in place of text_field: they are written with the
    tokenizer's chat template, and the loss counts the assistant's messages alone."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or "bytes"; set exactly when text is."""
    tokenizer_workers: int = 1
    """Tokenizer processes that build the data set."""
    pack_documents: bool = False
    """Whether windows are rows of whole documents, filled up with padding that does not count, instead of consecutive
    tokens; it implies the next three keys."""
    reset_position_ids: bool = False
    """Whether positions begin at 0 in each document."""
    reset_attention_mask: bool = False
    """Whether tokens see their own document alone."""
    eod_mask_loss: bool = False
    """Whether the first token of a document, which the end of another document predicts, is left out of the loss."""
    sequence_length: int = 1024
    """Tokens in a window."""
    micro_batch_size: int = 1
    """Windows in a micro-batch."""
    gradient_accumulation: int = 1
    """Micro-batches of each rank in an optimizer step."""
    validation_fraction: float = 0.01
    """Part of the windows that is held out for validation, 0 to 1."""

    def _validate(self) -> None:
        check(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2 tokens")
        for name in ("micro_batch_size", "gradient_accumulation"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a positive integer")
        check(0 <= self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "0 <= f < 1")
        both = bool(self.text) == (self.tokenizer is not None)
        check(both, "data.tokenizer", self.tokenizer, "set exactly when data.text is set")
        check(self.tokenizer_workers > 0, "data.tokenizer_workers", self.tokenizer_workers, "a positive integer")
        check((self.path is None) == bool(self.blend), "data.path", self.path, "a folder, or data.blend, and not both")
        check(not (self.blend and self.text), "data.text", list(self.text), "empty with data.blend")
        self.weights()

    @property
    def by_document(self) -> bool:
        """Whether attention or positions depend on where documents begin."""
        return self.pack_documents or self.reset_position_ids or self.reset_attention_mask

    def weights(self) -> dict[str, Fraction]:
        """Return the folders that windows are read from, with their weights."""
        if self.path is not None:
            return {self.path: Fraction(1)}
        found: dict[str, Fraction] = {}
        for text in self.blend:
            path, _, weight = text.rpartition("=")
            try:
                value = Fraction(weight)
            except (ValueError, ZeroDivisionError):
                value = Fraction(0)
            check(bool(path) and value > 0, "data.blend", text, '"folder=weight" with a positive number')
            check(path not in found, "data.blend", text, "each folder once")
            found[path] = value
        return found


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ConfigPart):
    """AdamW (arXiv 1711.05101), or Muon for matrices with AdamW for the rest.

    Patterns are globs over the names of parameters; the first match wins, and one that matches nothing is refused.
    There are no float32 buffers of gradients where a step is one micro-batch on one rank, or parameters have 32 bits.
    A skipped step is marked in the metrics.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer: with muon, the matrices of layers and experts are updated by Muon, and embedding, output layer,
    routers, norms and biases by AdamW."""
    lr: float = 3e-4
    """Peak learning rate."""
    lr_mult: tuple[str, ...] = ()
    """Multipliers of the learning rate, as "pattern=number" with a glob over parameter names."""
    wd_mult: tuple[str, ...] = ()
    """Multipliers of weight_decay, as "pattern=number"; a parameter that matches decays, also where it would not."""
    freeze: tuple[str, ...] = ()
    """Globs of parameters that are not trained."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's average of gradients."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon scales lr by the shape of a matrix: to updates as large as AdamW's, or by the root of rows / columns
    where that is above 1."""
    ema_decay: float | None = None
    """Decay rate of a float32 average of the trained parameters, which is exported as final-ema; unset means none."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """Decay rates of the averages of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the root of the average square."""
    weight_decay: float = 0.1
    """Decoupled weight decay; one-dimensional parameters and biases have none."""
    clip_grad_norm: float | None = 1.0
    """Largest norm of the gradient, to which longer ones are scaled; "none" switches clipping off."""
    master_weights: bool = False
    """Whether parameters of fewer than 32 bits have a float32 copy that is updated; quantized weights always have
    one."""
    moment_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """Dtype of the two running averages; float8 has a scale for each 128 values, and the short ones are rounded
    stochastically."""
    skip_nonfinite: bool = False
    """Whether a step whose gradient has an infinity or a NaN changes nothing and training goes on, instead of
    stopping."""
    skip_grad_norm_spike: float | None = None
    """A step whose gradient norm is more than this many times its running average changes nothing, from the twentieth
    step on; unset means none is skipped."""
    moe_router_bias_update_rate: float = 1e-3
    """How far a step moves the bias of each expert towards balance, where moe.router.expert_bias is true; a skipped
    step moves none."""
    accumulate_allreduce_grads_in_fp32: bool = True
    """Whether gradients of micro-batches and ranks are added up in float32, 4 bytes for each parameter, instead of
    the parameters' dtype."""

    def multipliers(self, key: Literal["lr_mult", "wd_mult"]) -> dict[str, float]:
        """Return the numbers of `lr_mult` or `wd_mult` by pattern."""
        found: dict[str, float] = {}
        for text in getattr(self, key):
            pattern, _, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            known = bool(pattern) and 0 <= value < float("inf")
            check(known, f"optimizer.{key}", text, '"pattern=number" with zero or a positive number')
            check(pattern not in found, f"optimizer.{key}", text, "each pattern once")
            found[pattern] = value
        return found

    def _validate(self) -> None:
        self.multipliers("lr_mult")
        self.multipliers("wd_mult")
        check(0 <= self.muon_momentum < 1, "optimizer.muon_momentum", self.muon_momentum, "0 <= momentum < 1")
        ema = self.ema_decay
        check(ema is None or 0 < ema < 1, "optimizer.ema_decay", ema, "a number between 0 and 1, or null")
        spike = self.skip_grad_norm_spike
        check(spike is None or spike > 1, "optimizer.skip_grad_norm_spike", spike, "a number above 1, or null")
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
class LoRAConfig(ConfigPart):
    """LoRA (arXiv 2106.09685) instead of training the weights: adapters through peft, over weights in high precision or
    stored quantized."""

    rank: int = 0
    """Rank of the adapters; 0 means none, and that the weights are trained."""
    alpha: float = 16.0
    """Scale of the adapters: alpha / rank multiplies what they add."""
    dropout: float = 0.0
    """Part of an adapter's input that is dropped in training."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers with adapters, as their last words ("linear_qkv"); "all-linear" means every GEMM layer,
    experts included."""

    def _validate(self) -> None:
        check(self.rank >= 0, "lora.rank", self.rank, "zero or a positive integer")
        check(self.alpha > 0, "lora.alpha", self.alpha, "a positive number")
        check(0 <= self.dropout < 1, "lora.dropout", self.dropout, "0 <= dropout < 1")
        check(bool(self.targets), "lora.targets", list(self.targets), "at least one name")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(ConfigPart):
    """The learning rate as a function of the step.

    A checkpoint has another curve if `steps`, `schedule` or `optimizer.lr` differ, unless the two curves agree in every
    step that was trained. After the end of the checkpoint's curve, "hold" stays at its last rate.
    """

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    """Curve after the warm-up: constant, a line or a cosine over all steps, falling as 1 / sqrt(step) from the end of
    the warm-up (inverse_sqrt), or constant with a final decay (wsd)."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to optimizer.lr."""
    decay_steps: int | None = None
    """Length of the final decay of wsd; unset means a tenth of the curve."""
    lr_wsd_decay_style: Literal["linear", "minus_sqrt"] = "linear"
    """Final decay of wsd: a line, or 1 - sqrt(part of the decay that is done) (minus_sqrt)."""
    min_lr_ratio: float = 0.1
    """Part of optimizer.lr at which linear, cosine and wsd end, and below which inverse_sqrt does not fall."""
    steps: int | None = None
    """Length of the curve, after which the learning rate stays where it ended; unset means the length of the run."""
    extend: Literal["hold", "replace"] | None = None
    """Which curve a run follows whose checkpoint had another one: the checkpoint's (hold), or the one configured now
    (replace); unset means that such a run is refused."""

    def _validate(self) -> None:
        check(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "zero or a positive integer")
        decay = self.decay_steps
        check(decay is None or self.kind == "wsd", "schedule.decay_steps", decay, "null unless schedule.kind is 'wsd'")
        style = self.lr_wsd_decay_style
        where = "schedule.lr_wsd_decay_style"
        check(style == "linear" or self.kind == "wsd", where, style, "'linear' unless schedule.kind is 'wsd'")
        check(decay is None or decay > 0, "schedule.decay_steps", decay, "a positive integer or null")
        check(0 <= self.min_lr_ratio <= 1, "schedule.min_lr_ratio", self.min_lr_ratio, "0 <= ratio <= 1")
        check(self.steps is None or self.steps > 0, "schedule.steps", self.steps, "a positive integer or null")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ConfigPart):
    """How the ranks share the model and the data; the product of the sizes, without the experts', is the number of
    ranks."""

    data_parallel_replicate_size: int | None = None
    """Copies of the model, whose gradients are averaged; unset means as many as the other sizes leave."""
    data_parallel_shard_size: int = 1
    """Ranks over which FSDP2 shards parameters, gradients and moments of each copy; -1 means all that are left."""
    tensor_model_parallel_size: int = 1
    """Ranks over which each layer is split."""
    sequence_parallel: bool = False
    """Whether ranks that split layers have a part of the tokens each between these layers."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are distributed, as pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Pipeline stages of each rank; unset means as many as the schedule needs, 1 or 2."""
    pipeline_schedule: str = "1F1B"
    """Schedule of the pipeline, by torch's name: 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV."""
    context_parallel_size: int = 1
    """Ranks that share each sequence; they read the same windows."""
    expert_model_parallel_size: int = 1
    """Data-parallel ranks over which the experts are distributed; each has an equal part."""
    expert_tensor_parallel_size: int | None = None
    """Ranks over which each expert is split; unset means tensor_model_parallel_size, the only one implemented."""
    expert_dispatch: Literal["all_to_all", "all_gather"] = "all_to_all"
    """How tokens reach distributed experts: each travels to the ranks of its experts (all_to_all), or every rank gets
    the tokens of all (all_gather)."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP2 frees gathered parameters between forward and backward pass: of layers (default), or of all
    (always)."""
    reduce_dtype: Literal["float32"] = "float32"
    """Dtype in which FSDP2 adds up the gradients of the ranks."""
    cpu_offload: bool = False
    """Whether sharded parameters stay in main memory; only false is implemented."""
    async_tensor_parallel: bool = False
    """Whether split layers overlap communication and compute; only false is implemented."""

    def _validate(self) -> None:
        names = (name for name in self.__dataclass_fields__ if name.endswith("_size"))
        check_sizes({name: getattr(self, name) for name in names}, "parallel.")
        tp = self.tensor_model_parallel_size
        where = "parallel.sequence_parallel"
        check(tp > 1 or not self.sequence_parallel, where, True, "False with tensor_model_parallel_size = 1")
        for name in ("cpu_offload", "async_tensor_parallel"):
            value = getattr(self, name)
            check(not value, f"parallel.{name}", value, "False, because nothing else is implemented")
        virtual, schedule = self.virtual_pipeline_model_parallel_size, self.pipeline_schedule
        staged = self.pipeline_model_parallel_size > 1
        allowed = "'1F1B' with pipeline_model_parallel_size = 1"
        check(staged or schedule == "1F1B", "parallel.pipeline_schedule", schedule, allowed)
        where = "parallel.virtual_pipeline_model_parallel_size"
        check(staged or virtual is None, where, virtual, "null with pipeline_model_parallel_size = 1")
        sharded = self.data_parallel_shard_size != 1
        default = self.reshard_after_forward == "default"
        where = "parallel.reshard_after_forward"
        check(sharded or default, where, self.reshard_after_forward, "'default' with data_parallel_shard_size = 1")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ConfigPart):
    """Number formats and the recipe of the linear layers.

    In the patterns of `overrides`, * is anything, ? one character, [02] one of those.
    """

    dtype: Literal["fp32", "bf16", "bf16-mixed"] = "bf16"
    """Number format: of parameters and compute, or float32 parameters with bf16 compute (bf16-mixed)."""
    recipe: Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"] = "none"
    """Recipe of the linear layers."""
    recipe_options: tuple[str, ...] = ()
    """Fields of the recipe, as "name=value" with a JSON value ("amax_history_len=16")."""
    overrides: tuple[str, ...] = ()
    """Recipes of layers by name, as "pattern=recipe" or "pattern=bf16" with a glob; the first match wins."""
    first_layers_bf16: int = 0
    """Layers at the beginning that stay in high precision."""
    last_layers_bf16: int = 0
    """Layers at the end that stay in high precision."""
    quantized_weights: bool = False
    """Whether the weights are stored quantized as well."""
    cache_weights: bool = False
    """Whether each weight is quantized once for a step, and not in every micro-batch."""
    cpu_gemm: Literal["auto", "bf16", "float32"] = "auto"
    """Dtype in which a CPU multiplies 16-bit matrices: the faster one of the first rank's machine (auto), which a run
    keeps when it continues, or this one."""

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
    """Whether the run shows its progress: a bar on a terminal, elsewhere a line for each step."""
    plot: bool = False
    """Whether the run draws loss.png (extra plot)."""
    statistics_every: int = 0
    """Steps between two records of what quantization did to each operand, in the metrics; 0: none."""
    peak_tflops: float | None = None
    """Dense bfloat16 peak of one device, in TFLOP/s: with it the metrics have `mfu`; unset: they do not."""

    def _validate(self) -> None:
        peak = self.peak_tflops
        check(peak is None or peak > 0, "log.peak_tflops", peak, "a positive number or null")
        check(self.statistics_every >= 0, "log.statistics_every", self.statistics_every, "zero or a positive integer")
