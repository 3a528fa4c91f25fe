"""The tables [optimizer], [lora] and [schedule]: what is trained, and how.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ConfigPart):
    """AdamW (arXiv 1711.05101), Muon for matrices with AdamW for the rest, or schedule-free AdamW (arXiv 2405.15682).

    Patterns are globs over the names of parameters; the first match wins, and one that matches nothing is refused.
    There are no float32 buffers of gradients where a step is one micro-batch on one rank, or parameters have 32 bits.
    A skipped step is marked in the metrics.
    """

    kind: Literal["adamw", "muon", "schedule_free"] = "adamw"
    """Optimizer: with muon, the matrices of layers and experts are updated by Muon, and embedding, output layer,
    routers, norms and biases by AdamW; with schedule_free, validation and checkpoints have its average of the
    weights."""
    lr: float = 3e-4
    """Peak learning rate."""
    lr_mult: tuple[str, ...] = ()
    """Multipliers of the learning rate, as "pattern=number" with a glob over parameter names, and over those of the
    matrices that a weight joins, such as linear_qkv.weight.k and linear_fc1.weight.up."""
    wd_mult: tuple[str, ...] = ()
    """Multipliers of weight_decay, as "pattern=number"; a parameter that matches decays, also where it would not."""
    freeze: tuple[str, ...] = ()
    """Globs of parameters that are not trained."""
    freeze_experts: tuple[str, ...] = ()
    """Experts that are not trained, as "pattern=numbers" with a glob over the names of stacks of experts and numbers
    from 0, as in "decoder.layers.0.mlp.experts.*=1,3"."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's average of gradients."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon scales lr by the shape of a matrix: to updates as large as AdamW's, or by the root of rows / columns
    where that is above 1."""
    muon_split: Literal["projections", "none"] = "projections"
    """What Muon takes for a matrix in a weight that joins projections, such as q, k and v, or gate and up: each of
    them, or with none the whole weight."""
    qk_clip_threshold: float | None = None
    """Largest attention logit of a head, to which QK-clip scales its rows of the query and key projections after a step
    in which it was larger (MuonClip with muon); unset means no clip."""
    ema_decay: float | None = None
    """Decay rate of a float32 average of the trained parameters, exported as final-ema; unset means none."""
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

    @property
    def needs_parts(self) -> bool:
        """Whether the optimizer asks what part of each parameter a rank has."""
        return bool(self.freeze_experts or self.lr_mult)

    def frozen_experts(self) -> dict[str, tuple[int, ...]]:
        """Return the numbers of `freeze_experts` by pattern."""
        found: dict[str, tuple[int, ...]] = {}
        for text in self.freeze_experts:
            pattern, _, numbers = text.rpartition("=")
            words = numbers.split(",")
            known = bool(pattern) and all(word.isdecimal() and len(word) < 7 for word in words)
            check(known, "optimizer.freeze_experts", text, '"pattern=numbers" with numbers from 0, such as 1,3')
            check(pattern not in found, "optimizer.freeze_experts", text, "each pattern once")
            found[pattern] = tuple(map(int, words))
        return found

    def _validate(self) -> None:
        self.frozen_experts()
        self.multipliers("lr_mult")
        self.multipliers("wd_mult")
        if self.kind == "schedule_free":
            where, first = "with optimizer.kind = 'schedule_free'", self.betas[:1]
            check(self.moment_dtype == "float32", "optimizer.moment_dtype", self.moment_dtype, f"'float32' {where}")
            check(self.ema_decay is None, "optimizer.ema_decay", self.ema_decay, f"null {where}, which has an average")
            check(first != (0.0,), "optimizer.betas", self.betas, f"a first number above 0 {where}")
            check(not self.freeze_experts, "optimizer.freeze_experts", list(self.freeze_experts), f"none {where}")
        tau = self.qk_clip_threshold
        check(tau is None or tau > 0, "optimizer.qk_clip_threshold", tau, "a positive number, or null")
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
    """LoRA (arXiv 2106.09685) instead of training the weights: adapters over weights in high precision or stored
    quantized."""

    rank: int = 0
    """Rank of the adapters; 0 means none, and that the weights are trained."""
    alpha: float = 16.0
    """Scale of the adapters: alpha / rank multiplies what they add."""
    dropout: float = 0.0
    """Part of an adapter's input that is dropped in training."""
    targets: tuple[str, ...] = ("all-linear",)
    """Globs of the names of layers with adapters, or of their last words ("linear_qkv"); "all-linear" means every GEMM
    layer, experts included."""
    use_dora: bool = False
    """Whether adapters also train the length of each row of a weight (DoRA, arXiv 2402.09353)."""

    def _validate(self) -> None:
        check(self.rank >= 0, "lora.rank", self.rank, "zero or a positive integer")
        check(self.alpha > 0, "lora.alpha", self.alpha, "a positive number")
        check(0 <= self.dropout < 1, "lora.dropout", self.dropout, "0 <= dropout < 1")
        check(bool(self.targets), "lora.targets", list(self.targets), "at least one name")


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(ConfigPart):
    """Local steps between exchanges of weights (DiLoCo, arXiv 2311.08105): each rank, or a few together, is a replica
    with an inner optimizer, that of [optimizer], and an outer one follows the mean of what they moved."""

    inner_steps: int = 0
    """Steps that each replica makes alone (the paper's H); 0 means that gradients are averaged in every step."""
    replica_ranks: int = 1
    """Neighbouring ranks that make one replica: their gradients are averaged in every step."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, SGD with Nesterov's momentum."""
    outer_momentum: float = 0.9
    """Momentum of the outer optimizer."""

    def _validate(self) -> None:
        check(self.inner_steps >= 0, "diloco.inner_steps", self.inner_steps, "zero or a positive integer")
        alone = self.replica_ranks > 0 if self.inner_steps else self.replica_ranks == 1
        allowed = "a positive integer" if self.inner_steps else "1 without diloco.inner_steps"
        check(alone, "diloco.replica_ranks", self.replica_ranks, allowed)
        check(self.outer_lr > 0, "diloco.outer_lr", self.outer_lr, "a positive number")
        check(0 <= self.outer_momentum < 1, "diloco.outer_momentum", self.outer_momentum, "0 <= momentum < 1")


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
