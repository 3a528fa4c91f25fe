"""The feed-forward part of a layer: an MLP, or a router and experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ConfigPart):
    """The feed-forward part. `gated`: `act(gate) * up`, fc1 rows are [gate | up].

    `clamp`, `alpha`, `up_offset` are gpt-oss's clamped SwiGLU: gate <= clamp, |up| <= clamp,
    `gate * sigmoid(alpha * gate) * (up + up_offset)`.
    """

    ffn_hidden_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"] = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def _validate(self) -> None:
        check(self.ffn_hidden_size > 0, "mlp.ffn_hidden_size", self.ffn_hidden_size, "a positive integer")
        check(self.clamp is None or self.clamp > 0, "mlp.clamp", self.clamp, "a positive number or null")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ConfigPart):
    """How tokens choose experts.

    `score`: "softmax" or "sigmoid" of the logits; `score_after_topk` applies it to the k selected logits only.
    `expert_bias` adds a number per expert to the scores for selection only (DeepSeek-V3). It is no parameter: training
    moves it towards balance (`te_models.update_expert_bias`).
    `linear_bias` is an ordinary bias of the router projection. `normalize` divides the k probabilities by their sum
    (plus `normalize_eps`). `num_groups`/`topk_groups` restrict the choice to the best groups, a group's value being
    the "max" or the "top2_sum" of its scores. `apply_on_input` multiplies the expert's input instead of its output.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    score_after_topk: bool = False
    expert_bias: bool = False
    linear_bias: bool = False
    normalize: bool = True
    normalize_eps: float = 0.0
    scaling_factor: float = 1.0
    num_groups: int | None = None
    topk_groups: int | None = None
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    dtype: Literal["input", "float32"] = "input"
    apply_on_input: bool = False

    def _validate(self) -> None:
        both = (self.num_groups is None) == (self.topk_groups is None)
        check(both, "router.topk_groups", self.topk_groups, "set exactly when router.num_groups is set")
        if self.num_groups is not None and self.topk_groups is not None:
            inside = 0 < self.topk_groups <= self.num_groups
            check(inside, "router.topk_groups", self.topk_groups, f"1..num_groups = {self.num_groups}")
        check(self.normalize_eps >= 0, "router.normalize_eps", self.normalize_eps, "zero or a positive number")


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ConfigPart):
    """A mixture of experts. `layers` lists the indices of MoE layers (None: all); the others are dense.

    `bias` is that of the experts; a shared expert has biases if `mlp.bias` is true, as dense layers do.
    `shared_expert_intermediate_size` None means no shared expert; `shared_expert_gate` multiplies its output by the
    sigmoid of a one-row projection of the input. `aux_loss_coeff` is the load-balancing loss weight (arXiv 2101.03961),
    `z_loss_coeff` the router z-loss weight (arXiv 2202.08906).
    """

    num_moe_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    layers: tuple[int, ...] | None = None
    bias: bool = False
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    router: RouterConfig = field(default_factory=RouterConfig)

    def _validate(self) -> None:
        experts = self.num_moe_experts
        check(experts > 0, "moe.num_moe_experts", experts, "a positive integer")
        check(
            0 < self.moe_router_topk <= experts,
            "moe.moe_router_topk",
            self.moe_router_topk,
            f"1..num_moe_experts = {experts}",
        )
        check(self.moe_ffn_hidden_size > 0, "moe.moe_ffn_hidden_size", self.moe_ffn_hidden_size, "a positive integer")
        shared = self.shared_expert_intermediate_size
        check(shared is None or shared > 0, "moe.shared_expert_intermediate_size", shared, "a positive integer or null")
        check(
            shared is not None or not self.shared_expert_gate,
            "moe.shared_expert_gate",
            self.shared_expert_gate,
            "false without a shared expert",
        )
        groups = self.router.num_groups
        check(
            groups is None or experts % groups == 0,
            "router.num_groups",
            groups,
            f"a divisor of num_moe_experts = {experts}",
        )
        if groups is not None and self.router.topk_groups is not None:
            size, topk = experts // groups, self.moe_router_topk
            enough = self.router.topk_groups * size >= topk
            what = f"so many groups of {size} that they have moe_router_topk = {topk} experts"
            check(enough, "router.topk_groups", self.router.topk_groups, what)
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            check(getattr(self, name) >= 0, f"moe.{name}", getattr(self, name), "zero or a positive number")
