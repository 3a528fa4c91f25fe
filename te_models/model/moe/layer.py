"""The mixture-of-experts sublayer: route each token to K of E experts, without dropping any.

B batch, S sequence, T = B*S tokens, H hidden, E experts, K experts per token.

Token counts per expert are data and stay on the device from the router to the grouped GEMM, so they change from step
to step without a host synchronisation and without recompiling. Where experts are distributed over ranks, see
`dispatch.py`: T is then the tokens of all of them between dispatch and combination.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from te_models.kernels.permute import within_capacity
from te_models.kernels.router import (
    joint_shares,
    load_balancing_loss,
    mean_probabilities,
    router_probabilities,
    router_topk,
    router_z_loss,
    weights_of,
)
from te_models.layers.collectives import all_gather
from te_models.layers.distributed.context_parallel import ContextShard, gather_rows_of_ranks, own_positions
from te_models.layers.distributed.sequence_parallel import SequenceShard, gather_tokens_of_ranks, own_share
from te_models.layers.module.linear import Linear

from ...config import ModelConfig
from ..build import Build, init_method, make_norm, make_output_linear
from ..mlp import SharedExperts
from .dispatch import ComputedBeside, dispatcher_of
from .experts import Experts
from .router import Router, RouterOutput, count_choices

NORMS = ("pre_shared_layernorm", "post_shared_layernorm", "pre_experts_layernorm", "post_experts_layernorm")
"""The norms of a mixture with `own_norms`."""


class MoELayer(nn.Module):
    """Router, experts and shared experts of one layer. Megatron-Core: `MoELayer`, dropless.

    Example:
        y, routed = MoELayer(config)(torch.randn(2, 16, config.hidden_size))

    x: [B, S, H] -> y [B, S, H]. Raises ValueError for a configuration without experts.
    """

    def __init__(self, config: ModelConfig, build: Build | None = None, layer: int | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("MoELayer needs a configuration with moe set; config.moe is None")
        build = build or Build()
        self.moe = config.moe
        self.router = Router(config, build, hashed=layer in config.moe.hash_layers)
        self.expert_model_parallel_size = build.expert_model_parallel_size
        self.dispatcher = dispatcher_of(config.moe, build)
        self._token_shard: SequenceShard | None = None
        if build.etp_group is not None and build.tp_group is not None and build.tp_size > 1:
            self._token_shard = SequenceShard(build.tp_group.rank(), build.tp_size, build.tp_group.group_name)
        self.context_shard: ContextShard | None = None
        latent, H, bias = config.moe.moe_latent_size, config.hidden_size, config.mlp.bias
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:  # every rank has these whole
            self.fc1_latent_proj = Linear(H, latent, bias, **build.gemm(init_method(config)))
            self.fc2_latent_proj = make_output_linear(config, latent, bias, build.whole)
        self.experts = Experts(config, build)
        self.shared_experts = None
        self.moe_shared_expert_overlap = False
        """Whether the shared expert computes while results of the others travel back."""
        if config.moe.shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(config, build)
        for name in NORMS if config.moe.own_norms else ():  # before and after the shared expert and the others
            setattr(self, name, make_norm(config.norm, config.hidden_size, build))

    def forward(
        self, x: Tensor, token_mask: Tensor | None = None, ids: Tensor | None = None
    ) -> tuple[Tensor, RouterOutput]:
        """x: [B, S, H] -> ([B, S, H], what the router decided). token_mask: [B, S] bool, False where a token is
        padding: such tokens are routed like others, but enter neither the router losses nor the balance of experts.
        ids: [B, S], of a layer whose experts a table chooses by the token."""
        tokens = x.flatten(0, -2)
        r, table = self.moe.router, self.router.expert_of_token
        logits = self.router(tokens)
        weighing: dict[str, Any] = {"score": r.score, "normalize": r.normalize, "normalize_eps": r.normalize_eps}
        weighing["scaling_factor"] = r.scaling_factor
        replayed = self.router.replayed
        if table is not None:
            assert ids is not None, "the model has asked for them"
            indices = table[ids.flatten()]
            weights = weights_of(logits, indices, **weighing)
        else:
            weights, indices = router_topk(
                logits,
                self.moe.moe_router_topk,
                score_after_topk=r.score_after_topk,
                expert_bias=self.router.expert_bias,
                num_groups=r.num_groups,
                topk_groups=r.topk_groups,
                group_score=r.group_score,
                **weighing,
            )
        if replayed is not None:
            indices = self._replayed(replayed, x, indices)
            weights = weights_of(logits, indices, score_after_topk=r.score_after_topk, **weighing)
        if self.router.expert_scale is not None:
            weights = weights * self.router.expert_scale.to(weights.dtype)[indices]
        if self.moe.own_norms:
            y, counts = self._beside(x, weights, indices)
        else:
            shared = self.shared_experts
            beside = (
                ComputedBeside(partial(shared, x)) if self.moe_shared_expert_overlap and shared is not None else None
            )
            y, counts = self._expert_sums(tokens, weights, indices, beside)
            y = y.view(x.shape)
            if shared is not None:
                own = None if beside is None else beside.result
                y = y + (shared(x) if own is None else own)
            y = y if self.moe.output_multiplier == 1.0 else y * self.moe.output_multiplier
        balanced = self.moe.aux_loss_coeff > 0 and table is None
        decided = self._router_output(logits, indices, counts, token_mask, x.shape[0], balanced)
        if self.router.recorded:
            decided = decided._replace(indices=indices.view(*x.shape[:-1], -1))
        return y, decided

    def _replayed(self, replayed: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the experts [T, K] of a record [B, S, K], those that the router has chosen where it has -1. x:
        [B, S, H]. Raises ValueError where the record is of other tokens."""
        replayed = own_positions(replayed, self.context_shard)
        if replayed.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"the RouterRecord that is replayed has choices of {list(replayed.shape[:-1])} tokens; allowed in this "
                f"call: {list(x.shape[:-1])}"
            )
        replayed = replayed.flatten(0, -2)
        return torch.where(replayed < 0, chosen, replayed)

    def _beside(self, x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The shared expert and the others, each between two separate norms. x: [B, S, H], not normed."""
        assert self.shared_experts is not None, "the configuration has been checked"
        pre_shared, post_shared, pre_experts, post_experts = (cast(nn.Module, getattr(self, name)) for name in NORMS)
        y, counts = self._expert_sums(pre_experts(x).flatten(0, -2), weights, indices)
        return post_shared(self.shared_experts(pre_shared(x))) + post_experts(y.view(x.shape)), counts

    def _expert_sums(
        self, tokens: Tensor, weights: Tensor, indices: Tensor, beside: ComputedBeside | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens: [T, H]; weights, indices: [T, K] -> (each token's weighted sum of its experts' results [T, H], how
        many of these tokens chose each expert [E] int64)."""
        tokens = tokens if self.fc1_latent_proj is None else self.fc1_latent_proj(tokens)
        experts, counts, capacity = self.moe.num_moe_experts, None, self.dispatcher.capacity(indices.numel())
        if capacity is not None:
            counts = count_choices(indices, experts)
            fits = within_capacity(indices, weights, experts, capacity, self.moe.moe_token_drop_policy)
            indices, weights = torch.where(fits, indices, experts), torch.where(fits, weights, 0)
        if self._token_shard is not None:
            y, chosen = self._sums_of_own_tokens(tokens, weights, indices, self._token_shard, beside), None
        else:
            y, chosen = self.dispatcher.sums(self.experts, tokens, weights, indices, beside)
        if counts is None:
            counts = count_choices(indices, experts) if chosen is None else chosen
        return y if self.fc2_latent_proj is None else self.fc2_latent_proj(y), counts

    def _sums_of_own_tokens(
        self, tokens: Tensor, weights: Tensor, indices: Tensor, shard: SequenceShard, beside: ComputedBeside | None
    ) -> Tensor:
        """`_expert_sums` of tokens that all ranks of a shard have: each sends its part of them to the experts."""
        total, none = tokens.shape[0], self.moe.num_moe_experts
        tokens, weights = own_share(tokens, shard), own_share(weights, shard)
        indices = own_share(indices, shard, fill=none)
        share = tokens.shape[0]
        if not self.dispatcher.needs_equal_shares:
            own = min(max(total - shard.rank * share, 0), share)
            tokens, weights, indices = tokens[:own], weights[:own], indices[:own]
        y, _ = self.dispatcher.sums(self.experts, tokens, weights, indices, beside)
        if y.shape[0] != share:
            y = torch.cat([y, y.new_zeros(share - y.shape[0], y.shape[1])])
        return gather_tokens_of_ranks(y, shard)[:total]

    def _router_output(
        self,
        logits: Tensor,
        indices: Tensor,
        counts: Tensor,
        token_mask: Tensor | None,
        sequences: int,
        balanced: bool,
    ) -> RouterOutput:
        """logits: [T, E]; indices: [T, K]; counts: [E]; token_mask: [B, S]; sequences: B; balanced: whether there is a
        load-balancing loss."""
        moe, mask = self.moe, None if token_mask is None else token_mask.flatten()
        balance = z = torch.zeros((), dtype=torch.float32, device=logits.device)
        own = mean = dropped = choices = None
        if mask is not None and self.router.counting:
            own = count_choices(indices, moe.num_moe_experts, mask)
        capacity = self.dispatcher.capacity(indices.numel())
        if capacity is not None:
            dropped = (counts - capacity).clamp(min=0).sum()
        if self.context_shard is not None and (balanced or moe.z_loss_coeff > 0):
            # the losses are of whole sequences
            shard = self.context_shard
            logits = _by_sequence(gather_rows_of_ranks(logits, shard), shard, sequences)
            indices = _by_sequence(all_gather(indices, shard.group), shard, sequences)
            mask = None if mask is None else _by_sequence(all_gather(mask, shard.group), shard, sequences)
        if balanced and moe.moe_router_load_balancing_type == "joint_aux_loss":
            choices, mean = joint_shares(logits, moe.moe_router_topk, mask)
        elif balanced:
            probabilities = router_probabilities(logits, moe.router.score)
            if moe.moe_router_load_balancing_type == "global_aux_loss":
                mean = mean_probabilities(probabilities, mask)
            elif moe.moe_router_load_balancing_type == "seq_aux_loss":
                by_sequence = probabilities.unflatten(0, (sequences, -1)), indices.unflatten(0, (sequences, -1))
                counted = None if mask is None else mask.unflatten(0, (sequences, -1))
                balance = load_balancing_loss(*by_sequence, counted)
            else:
                balance = load_balancing_loss(probabilities, indices, mask)
        if moe.z_loss_coeff > 0:
            z = router_z_loss(logits, mask)
        return RouterOutput(balance, z, counts, own, mean, dropped, choices)


def _by_sequence(rows: Tensor, shard: ContextShard, sequences: int) -> Tensor:
    """Bring rows of ranks that share sequences, [ranks T, ...] in rank order, together by sequence."""
    return rows.unflatten(0, (shard.ranks, sequences, -1)).transpose(0, 1).flatten(0, 2)
