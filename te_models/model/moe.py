"""The mixture-of-experts sublayer: route each token to K of E experts, without dropping any.

B batch, S sequence, T = B*S tokens, H hidden, E experts, K experts per token, I expert width.

Token counts per expert are data and stay on the device from the router to the grouped GEMM, so they change from step
to step without a host synchronisation and without recompiling. Where experts are distributed over ranks, see
`te_models.layers.distributed.expert_parallel`: T is then the tokens of all of them between dispatch and combination.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.permute import (
    Permutation,
    capacity_share,
    expert_capacity,
    fill_to_capacity,
    permute,
    sort_by_expert,
    unpermute,
    within_capacity,
)
from te_models.kernels.router import (
    joint_shares,
    load_balancing_loss,
    mean_probabilities,
    router_probabilities,
    router_topk,
    router_z_loss,
    weights_of,
)
from te_models.layers import GroupedLinear
from te_models.layers.collectives import all_gather
from te_models.layers.distributed.context_parallel import ContextShard, gather_rows
from te_models.layers.distributed.expert_parallel import (
    exchange_rows,
    exchange_splits,
    expert_of_row,
    gather_tokens,
    local_choices,
    repeat_rows,
    sum_rows,
    sum_tokens,
)
from te_models.layers.distributed.quantized_rows import RowFormats, row_formats
from te_models.layers.distributed.sequence_parallel import SequenceShard, gather_tokens_of_ranks, own_share

from ..config import ModelConfig
from .build import Build, LocalExperts, Normal, init_method, make_norm, output_init_method
from .mlp import SharedExperts, activation_of
from .router import Router, RouterOutput, count_choices

NORMS = ("pre_shared_layernorm", "post_shared_layernorm", "pre_experts_layernorm", "post_experts_layernorm")
"""The norms of a mixture with `own_norms`."""


class Experts(nn.Module):
    """E MLPs over rows sorted by expert, each projection one grouped GEMM; E is this rank's, `num_local_experts` from
    `first_expert` on. partial: each is split over ranks of its own, and results are this rank's part of a sum."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self._activation = activation_of(config.mlp)
        width, ranks = moe.moe_ffn_hidden_size, build.expert_model_parallel_size
        experts = self.num_local_experts = moe.num_moe_experts // ranks
        self.first_expert = 0 if build.ep_group is None else build.ep_group.rank() * experts
        self.partial = build.etp_group is not None and build.expert_tensor_parallel_size > 1
        build = build.of_experts

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
        x = x if self.partial else self.linear_fc1.whole_rows(x)
        hidden = self.linear_fc1(x, rows_per_expert, permutation=permutation, row_align=row_align)
        hidden = self._activation.forward(hidden)
        y = self.linear_fc2(hidden, rows_per_expert, row_align=row_align)
        if self.partial:
            return self.linear_fc2.with_bias(y, rows_per_expert, partial=True)
        y = self.linear_fc2.summed(y, None)
        return self.linear_fc2.with_bias(y, rows_per_expert) if self.linear_fc2.tp_size > 1 else y


class MoELayer(nn.Module):
    """Router, experts and shared experts of one layer. Megatron-Core: `MoELayer`, dropless.

    Example:
        y, routed = MoELayer(config)(torch.randn(2, 16, config.hidden_size))

    x: [B, S, H] -> y [B, S, H]. Raises ValueError for a configuration without experts.

    supposes_balance: whether rows travel as if all experts had equally many, for a plan, whose tensors have no values.
    """

    supposes_balance = False

    def __init__(self, config: ModelConfig, build: Build | None = None, layer: int | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("MoELayer needs a configuration with moe set; config.moe is None")
        build = build or Build()
        self.moe = config.moe
        factor = config.moe.moe_expert_capacity_factor
        self._capacity_share = None if factor is None else capacity_share(factor, config.moe.num_moe_experts)
        self.router = Router(config, build, hashed=layer in config.moe.hash_layers)
        self.expert_model_parallel_size = build.expert_model_parallel_size
        self.expert_dispatch = build.expert_dispatch
        self._ep_group_name = "" if build.ep_group is None else build.ep_group.group_name
        self._etp_group_name, self._etp_size = "", 1
        self._token_shard: SequenceShard | None = None
        if build.etp_group is not None:
            self._etp_group_name, self._etp_size = build.etp_group.group_name, build.etp_group.size()
            if build.tp_group is not None and build.tp_size > 1:
                self._token_shard = SequenceShard(build.tp_group.rank(), build.tp_size, build.tp_group.group_name)
        self.context_shard: ContextShard | None = None
        self.experts = Experts(config, build)
        self.shared_experts = None
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
        if self.router.expert_scale is not None:
            weights = weights * self.router.expert_scale.to(weights.dtype)[indices]
        if self.moe.own_norms:
            y, counts = self._beside(x, weights, indices)
        else:
            y, counts = self._expert_sums(tokens, weights, indices)
            y = y.view(x.shape)
            if self.shared_experts is not None:
                y = y + self.shared_experts(x)
            y = y if self.moe.output_multiplier == 1.0 else y * self.moe.output_multiplier
        return y, self._router_output(logits, indices, counts, token_mask, x.shape[0])

    def _beside(self, x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The shared expert and the others, each between norms of its own. x: [B, S, H], not normed."""
        assert self.shared_experts is not None, "the configuration has been checked"
        y, counts = self._expert_sums(self.pre_experts_layernorm(x).flatten(0, -2), weights, indices)
        shared = self.post_shared_layernorm(self.shared_experts(self.pre_shared_layernorm(x)))
        return shared + self.post_experts_layernorm(y.view(x.shape)), counts

    def _expert_sums(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: [T, H]; weights, indices: [T, K] -> (each token's weighted sum of its experts' results [T, H], how
        many of these tokens chose each expert [E] int64)."""
        experts, counts, capacity = self.moe.num_moe_experts, None, self._capacity(indices.numel())
        if capacity is not None:
            counts = count_choices(indices, experts)
            fits = within_capacity(indices, weights, experts, capacity, self.moe.moe_token_drop_policy)
            indices, weights = torch.where(fits, indices, experts), torch.where(fits, weights, 0)
        if self._token_shard is not None:
            y, chosen = self._sums_of_own_tokens(tokens, weights, indices, self._token_shard), None
        else:
            y, chosen = self._distributed_sums(tokens, weights, indices)
        if counts is None:
            counts = count_choices(indices, experts) if chosen is None else chosen
        return y, counts

    def _sums_of_own_tokens(self, tokens: Tensor, weights: Tensor, indices: Tensor, shard: SequenceShard) -> Tensor:
        """`_expert_sums` of tokens that all ranks of a shard have: each sends its part of them to the experts."""
        total, none = tokens.shape[0], self.moe.num_moe_experts
        tokens, weights = own_share(tokens, shard), own_share(weights, shard)
        indices = own_share(indices, shard, fill=none)
        share = tokens.shape[0]
        if self.expert_dispatch != "all_gather" or not self._is_distributed:
            own = min(max(total - shard.rank * share, 0), share)
            tokens, weights, indices = tokens[:own], weights[:own], indices[:own]
        y, _ = self._distributed_sums(tokens, weights, indices)
        if y.shape[0] != share:
            y = torch.cat([y, y.new_zeros(share - y.shape[0], y.shape[1])])
        return gather_tokens_of_ranks(y, shard)[:total]

    @property
    def _is_distributed(self) -> bool:
        """Whether other ranks have other experts, or other parts of them, and each its own tokens."""
        return self.expert_model_parallel_size > 1 or self._etp_size > 1

    def _distributed_sums(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (each token's weighted sum, and how many of these tokens chose each expert, if that is known)."""
        if not self._is_distributed:
            return self._local_sums(tokens, weights, indices)
        if self.expert_dispatch == "all_gather":
            return self._gathered_sums(tokens, weights, indices), None
        if self.expert_dispatch == "deepep":
            return self._sums_of_ranks(tokens, weights, indices)
        return self._exchanged_sums(tokens, weights, indices)

    def _capacity(self, slots: int) -> int | None:
        """Return how many of so many choices an expert takes; None: all."""
        return None if self._capacity_share is None else expert_capacity(slots, self._capacity_share)

    def _local_sums(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """`_expert_sums` of a rank that has all experts; counts without choices that were dropped."""
        on_input = self.moe.router.apply_on_input
        align = 1 if on_input else self.experts.linear_fc1.row_align(tokens.device)
        order = self._sorted(indices, align)
        rows = order.rows_per_expert[: self.moe.num_moe_experts]
        if on_input:
            valid = indices < self.moe.num_moe_experts
            tokens, weights = self._weighted(permute(tokens, order), weights, valid, order)
        results = self.experts(tokens, rows, None if on_input else order, align)
        return unpermute(results, order, weights), order.tokens_per_expert[: self.moe.num_moe_experts]

    def _sorted(self, indices: Tensor, align: int = 1) -> Permutation:
        """Sort slots by expert; choices that were dropped are one expert more, whose rows come last."""
        dropping = self._capacity_share is not None
        return sort_by_expert(indices, self.moe.num_moe_experts + dropping, align=align)

    def _weighted(self, rows: Tensor, weights: Tensor, valid: Tensor, order: Permutation) -> tuple[Tensor, Tensor]:
        """Return the rows times their weights, and what then multiplies their results: 1 of choices that are `valid`,
        [T, K] bool, else 0."""
        rows = rows * weights.flatten()[order.slot_of_row.clamp(min=0)][:, None].to(rows.dtype)
        return rows, valid.to(weights.dtype)

    def _gathered_sums(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """`_expert_sums` where every rank gets the tokens of all."""
        experts, dtype = self.experts.num_local_experts, tokens.dtype
        groups = [self._ep_group_name] if self.expert_model_parallel_size > 1 else []
        groups += [self._etp_group_name] if self._etp_size > 1 else []
        for group in groups:
            tokens, weights = gather_tokens(tokens, group), gather_tokens(weights, group)
            indices = all_gather(indices, group)
        indices, weights = local_choices(indices, weights, self.experts.first_expert, experts)
        order = sort_by_expert(indices, experts + 1)  # other ranks' experts as one, whose rows come last
        # tokens of all ranks are wider than their rows, so that the gradients are, which the ranks add up
        rows = permute(tokens, order, dtype=dtype)
        if self.moe.router.apply_on_input:
            rows = rows * weights.flatten()[order.slot_of_row][:, None].to(rows.dtype)
            weights = torch.ones_like(weights)
        results = self.experts(rows, order.tokens_per_expert[:experts])
        y = unpermute(results, order, weights, dtype=torch.float32)
        for group in reversed(groups):
            y = sum_tokens(y, group, results.dtype if group == groups[0] else torch.float32)
        return y

    def _exchanged_sums(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """`_local_sums` where each row travels to the rank of its expert, and its result back."""
        moe, group, ranks = self.moe, self._ep_group_name, self.expert_model_parallel_size
        formats = RowFormats()
        if self.expert_dispatch == "all_to_all_quantized":
            formats = row_formats(self.experts.linear_fc1.gemm_quantizers(), self.experts.linear_fc2.gemm_quantizers())
        capacity = self._capacity(indices.numel())
        room = capacity if moe.moe_pad_expert_input_to_capacity else None
        order = self._sorted(indices) if room is None else fill_to_capacity(indices, moe.num_moe_experts, room)
        rows = permute(tokens, order)  # sorted by expert, and so by rank
        slots = rows.shape[0]
        if moe.router.apply_on_input:
            rows, weights = self._weighted(rows, weights, indices < moe.num_moe_experts, order)
        if room is not None:
            local = self.experts.num_local_experts
            send = receive = [local * room] * ranks
            rows = exchange_rows(rows[: sum(send)], send, receive, group, formats.rows)
            rows = rows.view(ranks, local, room, -1).transpose(0, 1).flatten(0, 2)
            results = self.experts(rows, torch.full((local,), ranks * room, device=rows.device))
            results = results.view(local, ranks, room, -1).transpose(0, 1).flatten(0, 2)
        else:
            counts = order.tokens_per_expert[: moe.num_moe_experts]
            balanced = None
            if self.supposes_balance:
                balanced = slots if capacity is None else min(slots, moe.num_moe_experts * capacity)
            split = {"split_group": self._etp_group_name, "split_ranks": self._etp_size}
            send, receive, by_rank, shares = exchange_splits(counts, group, ranks, balanced=balanced, **split)
            rows = rows if capacity is None else rows[: sum(send)]
            rows = rows if ranks == 1 else exchange_rows(rows, send, receive, group, formats.rows)
            if self._etp_size == 1:
                results = self._exchanged_rows(rows, expert_of_row(by_rank, rows.shape[0]))
            else:
                received, etp = rows.shape[0], self._etp_group_name
                rows = repeat_rows(rows, shares, etp)
                results = self._exchanged_rows(rows, expert_of_row(by_rank, rows.shape[0]))
                results = sum_rows(results, shares, received, etp)
        if ranks > 1:
            results = exchange_rows(results, receive, send, group, gradients=formats.gradients)
        if capacity is not None:  # of choices that were dropped
            results = torch.cat([results, results.new_zeros(slots - sum(send), results.shape[1])])
        return unpermute(results, order, weights), order.tokens_per_expert[: moe.num_moe_experts]

    def _sums_of_ranks(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """`_local_sums` where each token travels once to each rank of its experts, and its partial sum back."""
        from te_models.layers.distributed import deepep  # imports the compiler, whose graphs it ends

        moe, capacity = self.moe, self._capacity(indices.numel())
        rows = indices.numel() if capacity is None else min(indices.numel(), moe.num_moe_experts * capacity)
        balanced = rows if self.supposes_balance else None
        received = deepep.dispatch_tokens(
            tokens, weights, indices, moe.num_moe_experts, self._ep_group_name, balanced=balanced
        )
        x, order = deepep.local_rows(received, self.experts.num_local_experts)
        weights = received.weights
        if moe.router.apply_on_input:
            x, weights = self._weighted(x, weights, received.experts >= 0, order)
        results = self.experts(x, order.rows_per_expert)
        return deepep.combine_tokens(unpermute(results, order, weights), received), received.chosen

    def _exchanged_rows(self, rows: Tensor, experts: Tensor) -> Tensor:
        """rows: [R, H]; experts: [R], which of this rank's each row is for -> their results, [R, H]."""
        align = self.experts.linear_fc1.row_align(rows.device)
        order = sort_by_expert(experts[:, None], self.experts.num_local_experts, align=align)
        return unpermute(self.experts(rows, order.rows_per_expert, order, align), order, None)

    def _router_output(
        self, logits: Tensor, indices: Tensor, counts: Tensor, token_mask: Tensor | None, sequences: int
    ) -> RouterOutput:
        """logits: [T, E]; indices: [T, K]; counts: [E]; token_mask: [B, S]; sequences: B."""
        moe, mask = self.moe, None if token_mask is None else token_mask.flatten()
        balance = z = torch.zeros((), dtype=torch.float32, device=logits.device)
        own = mean = dropped = choices = None
        if mask is not None and self.router.counting:
            own = count_choices(indices, moe.num_moe_experts, mask)
        capacity = self._capacity(indices.numel())
        if capacity is not None:
            dropped = (counts - capacity).clamp(min=0).sum()
        if self.context_shard is not None and (moe.aux_loss_coeff > 0 or moe.z_loss_coeff > 0):
            # the losses are of whole sequences
            shard = self.context_shard
            logits = _by_sequence(gather_rows(logits, shard), shard, sequences)
            indices = _by_sequence(all_gather(indices, shard.group), shard, sequences)
            mask = None if mask is None else _by_sequence(all_gather(mask, shard.group), shard, sequences)
        if moe.aux_loss_coeff > 0 and moe.moe_router_load_balancing_type == "joint_aux_loss":
            choices, mean = joint_shares(logits, moe.moe_router_topk, mask)
        elif moe.aux_loss_coeff > 0:
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
