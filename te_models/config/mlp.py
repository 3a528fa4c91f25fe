"""The feed-forward part of a layer: an MLP, or a router and experts."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ConfigPart):
    """The feed-forward part. `gated`: the rows of fc1 are [gate | up].

    `clamp`, `alpha`, `up_offset` are gpt-oss's clamped SwiGLU: gate <= clamp, |up| <= clamp,
    `gate * sigmoid(alpha * gate) * (up + up_offset)`.
    """

    ffn_hidden_size: int
    """Channels between the two linear layers."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu", "xielu"] = "silu"
    """Activation function; xielu has learned numbers in each layer (arXiv 2411.13010)."""
    gated: bool = True
    """Whether the activation of a gate multiplies the up projection: act(gate) * up."""
    bias: bool = False
    """Whether the linear layers have a bias."""
    clamp: float | None = None
    """Bound of the gate from above and of the up projection on both sides; unset means none."""
    alpha: float = 1.0
    """Factor of the gate inside the sigmoid of a clamped gate."""
    up_offset: float = 0.0
    """Added to the up projection before the gate multiplies it."""
    gate_multiplier: float = 1.0
    """Factor of the gate before its activation, in layers without experts."""
    output_multiplier: float = 1.0
    """Factor of the result, in layers without experts."""

    _LATER: ClassVar[frozenset[str]] = frozenset({"gate_multiplier", "output_multiplier"})

    def _validate(self) -> None:
        check(self.ffn_hidden_size > 0, "mlp.ffn_hidden_size", self.ffn_hidden_size, "a positive integer")
        check(
            self.gated or self.gate_multiplier == 1.0, "mlp.gate_multiplier", self.gate_multiplier, "1 without a gate"
        )
        learned = self.activation == "xielu" and (self.gated or self.clamp is not None)
        check(not learned, "mlp.activation", self.activation, "another one with gated or clamp")
        check(self.clamp is None or self.clamp > 0, "mlp.clamp", self.clamp, "a positive number or null")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ConfigPart):
    """How tokens choose experts.

    `expert_bias` is no parameter: training moves it towards balance (`te_models.update_expert_bias`).
    """

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function that makes scores of the router's logits."""
    score_after_topk: bool = False
    """Whether the scores are computed from the k selected logits only."""
    expert_bias: bool = False
    """Whether each expert has a bias that is added to its score for the selection only (DeepSeek-V3)."""
    linear_bias: bool = False
    """Whether the router's projection has a bias."""
    normalize: bool = True
    """Whether the scores of the k selected experts are divided by their sum."""
    normalize_eps: float = 0.0
    """Added to the sum by which the scores are divided."""
    scaling_factor: float = 1.0
    """Factor of the scores of the selected experts."""
    num_groups: int | None = None
    """Number of groups of experts of which only the best are used; unset means no groups."""
    topk_groups: int | None = None
    """Groups that each token may use; set exactly when num_groups is."""
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    """Value of a group: the largest score in it, or the sum of the two largest."""
    dtype: Literal["input", "float32"] = "input"
    """Dtype in which the router computes its logits: its input's dtype, or float32."""
    apply_on_input: bool = False
    """Whether the scores multiply the input of the experts instead of their output."""
    logits_softcap: float | None = None
    """Bound of the tanh soft cap of the router's logits; unset means none."""
    normed_input: bool = False
    """Whether an RMSNorm of the router's own, whose weight is divided by sqrt(hidden_size), norms what it reads."""
    expert_scale: bool = False
    """Whether each expert has a learned factor of its score, behind the normalisation."""

    _LATER: ClassVar[frozenset[str]] = frozenset({"logits_softcap", "normed_input", "expert_scale"})

    def _validate(self) -> None:
        both = (self.num_groups is None) == (self.topk_groups is None)
        check(both, "router.topk_groups", self.topk_groups, "set exactly when router.num_groups is set")
        if self.num_groups is not None and self.topk_groups is not None:
            inside = 0 < self.topk_groups <= self.num_groups
            check(inside, "router.topk_groups", self.topk_groups, f"1..num_groups = {self.num_groups}")
        cap = self.logits_softcap
        check(cap is None or cap > 0, "router.logits_softcap", cap, "a positive number or null")
        check(self.normalize_eps >= 0, "router.normalize_eps", self.normalize_eps, "zero or a positive number")


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ConfigPart):
    """A mixture of experts. A shared expert has biases if `mlp.bias` is true, as dense layers do."""

    num_moe_experts: int
    """Number of experts in each MoE layer."""
    moe_router_topk: int
    """Experts that each token uses."""
    moe_ffn_hidden_size: int
    """Channels between the two linear layers of an expert."""
    layers: tuple[int, ...] | None = None
    """Indices of the MoE layers, from 0; unset means all layers, and the others are dense."""
    bias: bool = False
    """Whether the linear layers of the experts have a bias."""
    shared_expert_intermediate_size: int | None = None
    """Channels between the two linear layers of an expert that every token uses; unset means no such expert."""
    shared_expert_gate: bool = False
    """Whether the sigmoid of a projection of the input to one number multiplies the shared expert's output."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "joint_aux_loss"] = (
        "aux_loss"
    )
    """Over which tokens the load-balancing loss compares experts: the tokens of a micro-batch on a rank (aux_loss), of
    each sequence (seq_aux_loss), of all ranks and the micro-batches of a step so far (global_aux_loss), each layer by
    itself; or the tokens of a micro-batch in all layers together, as transformers does (joint_aux_loss)."""
    aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss (arXiv 2101.03961)."""
    z_loss_coeff: float = 0.0
    """Weight of the router z-loss (arXiv 2202.08906)."""
    moe_expert_capacity_factor: float | None = None
    """An expert takes at most this many times its even share of a micro-batch's tokens on a rank, and drops the others;
    unset means that no token is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens a full expert keeps: the tokens of the largest weights (probs), or the first ones (position)."""
    moe_pad_expert_input_to_capacity: bool = False
    """Whether each expert of other ranks is sent as many rows as it takes, filled up: nothing waits for the router."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How tokens choose experts."""
    hash_layers: tuple[int, ...] = ()
    """Indices of the MoE layers whose experts a stored table chooses by the token, from 0; the router gives their
    weights alone, and they have no load-balancing loss."""
    post_layernorm: bool = False
    """Whether a norm follows the experts, in a model whose dense layers have none after the MLP (block "pre")."""

    own_norms: bool = False
    """Whether the shared expert and the others have norms before and after them each, and the router reads what comes
    before these norms (Gemma 4: experts beside an MLP)."""

    output_multiplier: float = 1.0
    """Factor of the sum of the experts' results, the shared one's included."""

    moe_latent_size: int | None = None
    """Channels that experts read and write, between a projection before their dispatch and one behind the weighted sum
    of their results, with biases if mlp.bias is true; unset means hidden_size, without projections (Nemotron 3)."""

    _LATER: ClassVar[frozenset[str]] = frozenset(
        {"post_layernorm", "own_norms", "hash_layers", "output_multiplier", "moe_latent_size"}
    )

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
        latent = self.moe_latent_size
        check(latent is None or latent > 0, "moe.moe_latent_size", latent, "a positive integer or null")
        own = shared is not None and not self.shared_expert_gate
        check(
            own or not self.own_norms, "moe.own_norms", self.own_norms, "false without a shared expert without a gate"
        )
        plain = self.output_multiplier == 1.0 or not self.own_norms
        check(plain, "moe.output_multiplier", self.output_multiplier, "1 with own_norms")
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
        factor = self.moe_expert_capacity_factor
        where = "moe.moe_expert_capacity_factor"
        check(factor is None or 0 < factor < math.inf, where, factor, "a positive number or null")
        pad, where = self.moe_pad_expert_input_to_capacity, "moe.moe_pad_expert_input_to_capacity"
        check(factor is not None or not pad, where, pad, "false without moe_expert_capacity_factor")
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            check(getattr(self, name) >= 0, f"moe.{name}", getattr(self, name), "zero or a positive number")
