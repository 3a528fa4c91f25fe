"""The router of a mixture of experts: its projection, what it decided, and how often it chose each expert.

T tokens, H hidden, E experts, K experts per token.

Counting is for balance over the global batch, and for metrics (`expert_bias.py`). A layer returns what its router
chose, and the decoder adds it up outside of the layer: what an activation checkpoint computes again is not counted
again.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import linear
from te_models.kernels.norm import rms_norm
from te_models.kernels.torch_versions import exporting
from te_models.kernels.without_autocast import compute_dtype, without_autocast
from te_models.layers.collectives import all_reduce, group_of_all
from te_models.layers.recipe.activation_checkpoint import recomputing

from ...config import ModelConfig
from ..build import Build, init_method


class RouterOutput(NamedTuple):
    """What a layer's router decided, for losses, balancing and monitoring. All of this rank's own tokens.

    load_balancing_loss, z_loss: float32 scalars, zero where the configuration gives them no weight (they are not
    computed then); tokens_per_expert: [E] int64, dropped ones included. balanced_per_expert: the same without padding,
    where training counts and there may be padding; else None. mean_probabilities: [E] float32, of the tokens that are
    no padding, where the loss is over the global batch or all layers; else None. choices_per_token: [E] float32, how
    many choices went to each expert per token, where it is over all layers; else None. dropped_tokens: [] int64, how
    many choices found no room; None where experts take all.
    """

    load_balancing_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor
    balanced_per_expert: Tensor | None = None
    mean_probabilities: Tensor | None = None
    dropped_tokens: Tensor | None = None
    choices_per_token: Tensor | None = None
    indices: Tensor | None = None


class Router(nn.Module):
    """The router projection. weight: [E, H]; bias: [E] if `linear_bias`; norm_weight: [H] if `normed_input`;
    expert_scale: [E], of the scores of the chosen, with the option of this name. hashed: a table chooses experts by the
    token. Buffers: expert_of_token [V, K] int64 then; expert_bias [E] with the
    option of this name, kept in float32; and expert_counts [E] and dropped_tokens [1] int64, in no checkpoint: how many
    tokens chose each expert, and found no room, since the last `update_expert_bias` or `take_expert_load`.

    layer_group: the name of the group of the ranks that have the layer; None: all, if any of a whole model. recorded,
    replayed: see `RouterRecord`: whether what is decided has the experts of each token, and experts [B, S, K] that take
    the place of those that would be chosen, -1 for a free choice."""

    expert_bias: Tensor | None
    expert_of_token: Tensor | None
    expert_counts: Tensor
    dropped_tokens: Tensor
    layer_group: str | None = None
    recorded = False
    replayed: Tensor | None = None

    def __init__(self, config: ModelConfig, build: Build, *, hashed: bool = False) -> None:
        super().__init__()
        assert config.moe is not None
        self.config, self.hashed = config.moe.router, hashed
        self.init_method = init_method(config)
        experts = config.moe.num_moe_experts
        self.weight = build.parameter(experts, config.hidden_size)
        self.epsilon = config.norm.layernorm_epsilon
        self.norm_weight = build.parameter(config.hidden_size) if self.config.normed_input else None
        self.expert_scale = build.parameter(experts) if self.config.expert_scale else None
        self.bias = build.parameter(experts) if self.config.linear_bias else None
        bias = None
        if self.config.expert_bias and not hashed:
            bias = torch.empty(experts, dtype=torch.float32, device=build.device)
        self.register_buffer("expert_bias", bias)
        table = None
        if hashed:
            size = config.vocab_size, config.moe.moe_router_topk
            table = torch.empty(size, dtype=torch.int64, device=build.device)
        self.register_buffer("expert_of_token", table)
        for name, size in {"expert_counts": experts, "dropped_tokens": 1}.items():
            counts = torch.empty(size, dtype=torch.int64, device=build.device)
            self.register_buffer(name, counts, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again; both biases and the counts start at zero."""
        self.init_method(self.weight)
        for tensor in (self.bias, self.expert_bias, self.expert_counts, self.dropped_tokens):
            if tensor is not None:
                tensor.zero_()
        if self.expert_of_token is not None:  # as spread as a hash
            table = self.expert_of_token
            table.copy_((torch.arange(table.numel(), device=table.device) % self.weight.shape[0]).view_as(table))
        for factor in (self.norm_weight, self.expert_scale):
            if factor is not None:
                factor.fill_(1.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Selection compares scores that differ by less than bfloat16 resolves, so this bias is never rounded.
        exact, counts = self.expert_bias, (self.expert_counts, self.dropped_tokens)
        super()._apply(fn, recurse)
        bias = self.expert_bias
        if exact is not None and bias is not None and bias.dtype != torch.float32:
            self.expert_bias = exact.to(bias.device)
        for before, moved in zip(counts, (self.expert_counts, self.dropped_tokens), strict=True):
            _ = moved.zero_() if before.is_meta else moved.copy_(before)  # no file fills them after `to_empty`
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> logits [T, E], in float32 if the configuration says so, else in the compute dtype."""
        dtype = torch.float32 if self.config.dtype == "float32" else compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.norm_weight is not None:
            x = rms_norm(x, self.norm_weight, self.epsilon, cast_order="weight_first") * x.shape[-1] ** -0.5
        x, cap = x.to(dtype), self.config.logits_softcap
        with without_autocast(x):
            logits = linear(x, self.weight.to(dtype), bias)
            return logits if cap is None else torch.tanh(logits.float() / cap) * cap

    @property
    def counting(self) -> bool:
        """Whether choices count now: in training mode and with gradients, unlike in evaluation and generation."""
        return not exporting() and self.training and torch.is_grad_enabled()

    def count(self, decided: RouterOutput) -> None:
        """Add to the buffers what this router decided, if choices count now. `GPTModel` calls it once for each
        layer and forward pass; whoever calls layers alone may, outside of any activation checkpoint."""
        if not self.counting:
            return
        if not compiling() and recomputing():
            return
        own = decided.balanced_per_expert
        self.expert_counts.add_(decided.tokens_per_expert if own is None else own)
        if decided.dropped_tokens is not None:
            self.dropped_tokens.add_(decided.dropped_tokens)


def count_choices(indices: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """Return how many tokens chose each expert, [E] int64. indices: [T, K]; mask: [T] bool, True where a token counts
    (None: all)."""
    chosen = indices[..., None] == torch.arange(experts, device=indices.device)
    return (chosen if mask is None else chosen & mask[:, None, None]).sum((0, 1))


def load_balancing_losses(routed: list[RouterOutput], routers: list[Router], *, whole: bool) -> Tensor:
    """Return the loss of each MoE layer, [MoE layers], or the one of all of them, [1]. routers: of the layers in order;
    there may be more; whole: whether they are of a whole model, not of a stage. Over the global batch, experts' shares
    are those of the choices of all ranks that have these layers since the last `take_expert_load`; evaluation compares
    a rank's own. Layers whose experts a table chooses have no loss, as in transformers: no training balances them.
    Raises RuntimeError where it is not known which ranks these are."""
    pairs = [pair for pair in zip(routed, routers, strict=False) if not pair[1].hashed]
    if not pairs:
        return routed[0].load_balancing_loss.new_zeros(1)
    routed, routers = map(list, zip(*pairs, strict=True))
    if routed[0].mean_probabilities is None:
        return torch.stack([r.load_balancing_loss for r in routed])
    means = torch.stack([r.mean_probabilities for r in routed if r.mean_probabilities is not None])
    if routed[0].choices_per_token is not None:  # transformers': layers have equally many tokens
        choices = torch.stack([r.choices_per_token for r in routed if r.choices_per_token is not None])
        return means.shape[-1] * (choices.mean(0) * means.mean(0)).sum(-1, keepdim=True)
    if routers[0].counting:
        counts = torch.stack([router.expert_counts for router in routers])
        group, everyone = routers[0].layer_group, group_of_all()
        if group is None and everyone is not None and not whole:
            raise RuntimeError(
                "moe_router_load_balancing_type is 'global_aux_loss' in a stage, and which ranks have the same layers "
                "is not known; allowed: the stages that te_models.parallel.parallelize makes"
            )
        counts = counts if everyone is None else all_reduce(counts, group or everyone)
    else:
        counts = torch.stack([r.tokens_per_expert for r in routed])
    shares = counts.float() / counts.sum(-1, keepdim=True).clamp(min=1)
    return counts.shape[-1] * (shares * means).sum(-1)
