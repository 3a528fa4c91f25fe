"""The mixture-of-experts sublayer: route each token to K of E experts, without dropping any.

B batch, S sequence, T = B*S tokens, H hidden, E experts, K experts per token, I expert width.

Token counts per expert are data and stay on the device from the router to the grouped GEMM, so they change from step
to step without a host synchronisation and without recompiling. Where experts are distributed over ranks, see
`te_models.layers.distributed.expert_parallel`: T is then the tokens of all of them between dispatch and combination.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_models.kernels.permute import Permutation, permute, sort_by_expert, unpermute
from te_models.kernels.router import load_balancing_loss, router_probabilities, router_topk, router_z_loss
from te_models.layers import GroupedLinear
from te_models.layers.collectives import all_gather
from te_models.layers.distributed.expert_parallel import gather_tokens, local_choices, sum_tokens

from ..config import ModelConfig
from .build import Build, LocalExperts, Normal, init_method, output_init_method
from .mlp import SharedExperts, activation_of
from .router import Router, RouterOutput, count_choices


class Experts(nn.Module):
    """E MLPs over rows sorted by expert, each projection one grouped GEMM; E is this rank's, `num_local_experts` from
    `first_expert` on."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self._activation = activation_of(config.mlp)
        width, ranks = moe.moe_ffn_hidden_size, build.expert_model_parallel_size
        experts = self.num_local_experts = moe.num_moe_experts // ranks
        self.first_expert = 0 if build.ep_group is None else build.ep_group.rank() * experts

        def start(whole: Normal) -> Normal | LocalExperts:
            return whole if ranks == 1 else LocalExperts(whole, self.first_expert, moe.num_moe_experts)

        shared = {"single_grouped_weight": build.expert_layout == "grouped", **build.new}
        rows = (width,) * (2 if config.mlp.gated else 1)
        self.linear_fc1 = GroupedLinear(
            experts,
            config.hidden_size,
            sum(rows),
            moe.bias,
            init_method=build.starting(start(init_method(config)), rows),
            **shared,
            **build.split("column"),
        )
        self.linear_fc2 = GroupedLinear(
            experts,
            width,
            config.hidden_size,
            moe.bias,
            init_method=start(output_init_method(config)),
            **shared,
            **build.split("row"),
        )
        self.linear_fc1.reduce_amax = self.linear_fc2.reduce_amax = ranks == 1

    def forward(
        self, x: Tensor, rows_per_expert: Tensor, permutation: Permutation | None = None, row_align: int = 1
    ) -> Tensor:
        """x: [R, H], rows sorted by expert, or with `permutation` the tokens [T, H] that they come from;
        rows_per_expert: [E], multiples of row_align -> [R, H]."""
        if permutation is not None and self.linear_fc1.tp_size > 1:
            x, permutation = permute(x, permutation), None
        x = self.linear_fc1.whole_rows(x)
        hidden = self.linear_fc1(x, rows_per_expert, permutation=permutation, row_align=row_align)
        hidden = self._activation.forward(hidden)
        y = self.linear_fc2.summed(self.linear_fc2(hidden, rows_per_expert, row_align=row_align), None)
        return self.linear_fc2.with_bias(y, rows_per_expert) if self.linear_fc2.tp_size > 1 else y


class MoELayer(nn.Module):
    """Router, experts and shared experts of one layer. Megatron-Core: `MoELayer`, dropless.

    Example:
        y, routed = MoELayer(config)(torch.randn(2, 16, config.hidden_size))

    x: [B, S, H] -> y [B, S, H]. Raises ValueError for a configuration without experts.
    """

    def __init__(self, config: ModelConfig, build: Build | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("MoELayer needs a configuration with moe set; config.moe is None")
        build = build or Build()
        self.moe = config.moe
        self.router = Router(config, build)
        self.expert_model_parallel_size = build.expert_model_parallel_size
        self._ep_group_name = "" if build.ep_group is None else build.ep_group.group_name
        self.experts = Experts(config, build)
        self.shared_experts = None
        if config.moe.shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(config, build)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, RouterOutput]:
        """x: [B, S, H] -> ([B, S, H], what the router decided). token_mask: [B, S] bool, False where a token is
        padding: such tokens are routed like others, but enter neither the router losses nor the balance of experts."""
        tokens = x.flatten(0, -2)
        r, moe = self.moe.router, self.moe
        logits = self.router(tokens)
        weights, indices = router_topk(
            logits,
            moe.moe_router_topk,
            score=r.score,
            score_after_topk=r.score_after_topk,
            expert_bias=self.router.expert_bias,
            normalize=r.normalize,
            normalize_eps=r.normalize_eps,
            scaling_factor=r.scaling_factor,
            num_groups=r.num_groups,
            topk_groups=r.topk_groups,
            group_score=r.group_score,
        )
        y, counts = self._expert_sums(tokens, weights, indices)
        y = y.view(x.shape)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        mask = None if token_mask is None else token_mask.flatten()
        return y, self._router_output(logits, indices, counts, mask)

    def _expert_sums(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: [T, H]; weights, indices: [T, K] -> (each token's weighted sum of its experts' results [T, H], how
        many of these tokens chose each expert [E] int64)."""
        experts, group = self.experts.num_local_experts, self._ep_group_name
        distributed = self.expert_model_parallel_size > 1
        dtype = tokens.dtype
        on_input = self.moe.router.apply_on_input
        if not distributed:
            align = 1 if on_input else self.experts.linear_fc1.row_align(tokens.device)
            order = sort_by_expert(indices, experts, align=align)
            counts = order.tokens_per_expert
            if not on_input:
                results = self.experts(tokens, order.rows_per_expert, order, align)
                return unpermute(results, order, weights), counts
        else:
            counts = count_choices(indices, self.moe.num_moe_experts)
            tokens, weights = gather_tokens(tokens, group), gather_tokens(weights, group)
            indices = all_gather(indices, group)
            indices, weights = local_choices(indices, weights, self.experts.first_expert, experts)
            order = sort_by_expert(indices, experts + 1)  # other ranks' experts as one, whose rows come last
        # tokens of all ranks are wider than their rows, so that the gradients are, which the ranks add up
        rows = permute(tokens, order, dtype=dtype)
        if on_input:
            rows = rows * weights.flatten()[order.slot_of_row][:, None].to(rows.dtype)
            weights = torch.ones_like(weights)
        results = self.experts(rows, order.tokens_per_expert[:experts])
        if not distributed:
            return unpermute(results, order, weights), counts
        return sum_tokens(unpermute(results, order, weights, dtype=torch.float32), group, results.dtype), counts

    def _router_output(self, logits: Tensor, indices: Tensor, counts: Tensor, mask: Tensor | None) -> RouterOutput:
        balance = z = torch.zeros((), dtype=torch.float32, device=logits.device)
        if self.moe.aux_loss_coeff > 0:
            balance = load_balancing_loss(router_probabilities(logits, self.moe.router.score), indices, mask)
        if self.moe.z_loss_coeff > 0:
            z = router_z_loss(logits, mask)
        own = None
        if mask is not None and self.router.counting:
            own = count_choices(indices, self.moe.num_moe_experts, mask)
        return RouterOutput(balance, z, counts, own)
