"""The end of the model: output layer, loss, and the value a forward call returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from te_models.kernels.cross_entropy import (
    IGNORE_INDEX,
    cross_entropy,
    cross_entropy_and_z_loss,
    linear_cross_entropy,
    linear_cross_entropy_and_z_loss,
    output_logits,
    shift_labels,
)
from te_models.kernels.without_autocast import compute_dtype
from te_models.layers.collectives import all_reduce
from te_models.layers.distributed.context_parallel import (
    ContextShard,
    gather_positions,
    mean_of_ranks,
    own_positions,
)
from te_models.layers.distributed.tensor_parallel import TensorParallelModule
from te_models.layers.distributed.vocab_parallel import (
    gather_logits,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_log_probs,
)
from te_models.layers.gemm.wgrad import main_grad_of

from ..config import ModelConfig
from .build import Build, WordsOfRank, init_method
from .constants import ConstantModule
from .moe import RouterOutput


@dataclass
class ModelOutput:
    """The result of a model call. A field that was not requested, or does not apply, is None.

    logits: [B, S, V] in the compute dtype. loss: float32 scalar (float64 of a model in float64), the mean
    cross entropy of the labels plus aux_loss and, in training, what the terms below add.
    aux_loss: float32 scalar, the weighted losses of routers and indexers of all layers as they enter the loss (0
    without such losses).
    load_balancing_loss, z_loss: float32 scalars, unweighted means over the MoE layers, for monitoring.
    tokens_per_expert: [MoE layers, E] int64.
    mtp_loss: the mean cross entropy of the layers that predict further tokens, a scalar as the loss; `loss` has it
    times `config.mtp_loss_scaling_factor`.
    logits_z_loss: as the loss a scalar, the z-loss of the logits as it enters the loss; see `OutputLayer`.
    hidden_states: [B, S, H] each: the embeddings, the output of each layer but the last, and the output of the last
    layer after the final norm.
    logprobs: [B, S] in the dtype of the loss, the log-probability of labels[s + 1] at position s, 0 where it does not
    count.
    router_indices: int64 [MoE layers, B, S, K], the experts that each token was sent to.
    """

    logits: Tensor | None = None
    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    load_balancing_loss: Tensor | None = None
    z_loss: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    mtp_loss: Tensor | None = None
    logits_z_loss: Tensor | None = None
    logprobs: Tensor | None = None
    router_indices: Tensor | None = None

    def set_router_losses(self, routed: list[RouterOutput], balance: Tensor, weights: RouterLossWeights) -> None:
        """Fill in what routers decided, and their weighted losses. balance: the load-balancing losses, [losses]."""
        z = torch.stack([r.z_loss for r in routed])
        self.tokens_per_expert = torch.stack([r.tokens_per_expert for r in routed])
        self.load_balancing_loss, self.z_loss = balance.mean(), z.mean()
        self.aux_loss = balance.sum() * weights.aux_loss_coeff + z.sum() * weights.z_loss_coeff

    def add_aux_losses(self, losses: list[Tensor]) -> None:
        """Add weighted losses to aux_loss, and aux_loss to the loss."""
        if losses:
            added = torch.stack(losses).sum()
            self.aux_loss = added if self.aux_loss is None else self.aux_loss + added
        if self.loss is not None and self.aux_loss is not None:
            self.loss = self.loss + self.aux_loss


# torch.export flattens what a program returns
register_dataclass(ModelOutput, serialized_type_name="te_models.ModelOutput")


class OutputLayer(TensorParallelModule):
    """The vocabulary projection. weight: [V, H], absent when shared with the embedding; bias: [V]. Ranks that split
    layers have consecutive rows each: the loss is computed from each rank's own logits, and logits that are returned
    are gathered.

    Not a `te_models.layers.Linear`: it stays in high precision under every recipe, and its GEMM belongs to the loss.

    loss_chunk_tokens: set it to compute a loss without logits from the logits of this many tokens at a time. Memory
    then no longer grows with tokens x vocabulary: 8192 tokens, H 576, V 49152 in bfloat16 on CPU by 512 take 223 MB
    instead of 844, and about a fifth more time. None: all tokens at once, as good up to some 2000 tokens.

    logits_z_loss_coeff: set it to add this multiple of the mean of logsumexp(logits)^2 to the loss of training (z-loss,
    PaLM, arXiv 2204.02311, section 5); 0: none.

    fuse_wgrad_accumulation: set it to add the weight's gradient to `weight.main_grad`, as in `te_models.layers.Linear`.
    """

    parallel_mode = None
    loss_chunk_tokens: int | None = None
    logits_z_loss_coeff = 0.0
    fuse_wgrad_accumulation = False

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config = config.embedding
        self.set_parallel(build.tp_group, 1, build.sequence_parallel)
        self.shard = build.vocab_shard(config.vocab_size)
        self.context_shard: ContextShard | None = None
        self.init_method = WordsOfRank(init_method(config), self.shard)
        shared, words = config.embedding.share_embeddings_and_output_weights, build.own_words(config.vocab_size)
        self.weight = None if shared else build.parameter(words, config.hidden_size)
        self.bias = build.parameter(words) if config.embedding.output_bias else None
        for parameter in (self.weight, self.bias):
            self.mark_part(parameter, None if self.shard is None else 0)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again."""
        if self.weight is not None:
            self.init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def forward(
        self,
        x: Tensor,
        shared_weight: Tensor | None,
        labels: Tensor | None,
        *,
        return_logits: bool,
        batch_size: int | None = None,
        with_z_loss: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """x: [B, S, H]; shared_weight: the embedding's [V, H], of a layer that has none; labels: [B, S].
        batch_size: of x that is a rank's part of the tokens, [T / ranks, H]. with_z_loss: compute the z-loss, where
        `logits_z_loss_coeff` is above 0.

        Returns (logits [B, S, V] or None, cross entropy or None, z-loss times its coefficient or None). Without logits
        the loss never holds them in float32. Raises ValueError where the weight has no data, with which torch would
        multiply, and return any numbers.
        """
        dtype = compute_dtype(x)
        weight = self.weight if shared_weight is None else shared_weight
        assert weight is not None, "shared, or the layer's own"
        _check_has_data(weight, x)
        main_grad = main_grad_of(weight, self.fuse_wgrad_accumulation)
        weight = weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        scaled: dict[str, Any] = {"multiplier": self.config.logits_multiplier, "softcap": self.config.logits_softcap}
        scaled["main_grad"] = main_grad
        x = self.whole_rows(x.to(dtype))
        x = x if batch_size is None else x.unflatten(0, (batch_size, -1))
        targets = None
        if labels is not None:
            targets = own_positions(shift_labels(labels), self.context_shard).flatten()
        if not return_logits:
            if targets is None:
                return None, None, None
            scaled["chunk_tokens"] = self.loss_chunk_tokens
            if with_z_loss and self.logits_z_loss_coeff and self.shard is None:
                both = linear_cross_entropy_and_z_loss(x.flatten(0, 1), weight, targets, bias, **scaled)
                return None, *self._with_z_loss(both, targets)
            if self.shard is None:
                loss = linear_cross_entropy(x.flatten(0, 1), weight, targets, bias, **scaled)
            else:
                scaled["z_loss_coeff"] = self.logits_z_loss_coeff if with_z_loss else 0.0
                of_shard = vocab_parallel_linear_cross_entropy
                loss, z_loss = of_shard(x.flatten(0, 1), weight, targets, self.shard, bias, **scaled)
                if scaled["z_loss_coeff"]:  # a part of the loss, whose gradient is the loss's
                    loss, z_loss = self._with_z_loss((loss, z_loss), targets)
                    return None, loss - z_loss, z_loss
            return None, self._of_all_positions(loss, targets), None
        logits = output_logits(x, weight, bias, **scaled)
        if self.shard is not None:
            logits = gather_logits(logits, self.shard)
        loss = z_loss = None
        if targets is not None and with_z_loss and self.logits_z_loss_coeff:
            loss, z_loss = self._with_z_loss(cross_entropy_and_z_loss(logits.flatten(0, 1), targets), targets)
        elif targets is not None:
            loss = self._of_all_positions(cross_entropy(logits.flatten(0, 1), targets), targets)
        return logits if self.context_shard is None else gather_positions(logits, self.context_shard), loss, z_loss

    def token_log_probs(
        self, x: Tensor, shared_weight: Tensor | None, labels: Tensor, batch_size: int | None = None
    ) -> Tensor:
        """Return the log-probability of each label, float32 [B, S]: that of labels[s + 1] at position s, 0 where it
        does not count and at the last one. x: [B, S, H], behind the final norm; other arguments as for `forward`.

        Logits of `loss_chunk_tokens` tokens (None: 1024) and 32,768 words exist at a time, and are computed again in
        the backward pass.
        """
        rows, weight, bias = self.operands(x, shared_weight)
        targets = own_positions(shift_labels(labels), self.context_shard)
        scaled: dict[str, Any] = {"multiplier": self.config.logits_multiplier, "softcap": self.config.logits_softcap}
        scaled["chunk_tokens"] = self.loss_chunk_tokens
        found = vocab_parallel_linear_log_probs(rows, weight, targets.flatten(), self.shard, bias, **scaled)
        found = found.view(targets.shape)
        return found if self.context_shard is None else gather_positions(found, self.context_shard)

    def operands(self, x: Tensor, shared_weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the projection multiplies, in the compute dtype: all rows [T, H] of x, the weight [V, H] and the
        bias [V] or None. Arguments as for `token_log_probs`."""
        dtype, weight = compute_dtype(x), self.weight if shared_weight is None else shared_weight
        assert weight is not None, "shared, or the layer's own"
        _check_has_data(weight, x)
        x = self.whole_rows(x.to(dtype))
        return x.flatten(0, -2), weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def _with_z_loss(self, both: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, z_loss = (self._of_all_positions(term, targets) for term in both)
        return loss, z_loss * self.logits_z_loss_coeff

    def _of_all_positions(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the shared sequences from the mean loss of this rank's positions."""
        if self.context_shard is None:
            return loss
        own = (targets != IGNORE_INDEX).sum()
        every = all_reduce(own, self.context_shard.group)
        own = (own * self.context_shard.ranks).to(loss.dtype)
        share = loss * (own / every.clamp(min=1))
        return mean_of_ranks(share, self.context_shard)


def _check_has_data(weight: Tensor, x: Tensor) -> None:
    if weight.is_meta and not x.is_meta:
        raise ValueError(
            "the output layer shares the embedding's weight, which is on the meta device; allowed: a model whose "
            "embedding is not offloaded"
        )


class RouterLossWeights(ConstantModule):
    """The weights of the two router losses, as tensors: changing them does not recompile."""

    aux_loss_coeff: Tensor
    z_loss_coeff: Tensor

    def __init__(self, aux_loss_coeff: float, z_loss_coeff: float, device: torch.device | str | None) -> None:
        super().__init__()
        self.values = {"aux_loss_coeff": aux_loss_coeff, "z_loss_coeff": z_loss_coeff}
        self.computed = {name for name, value in self.values.items() if value > 0}
        self.register_constants(device)

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in self.values.items()}

    def set(self, name: str, value: float) -> None:
        """Change one weight from now on. Raises ValueError if it is negative, or was built as zero: that loss is then
        not computed."""
        if name not in self.computed:
            raise ValueError(f"moe.{name} is 0 in this model's configuration, so that loss is not computed")
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; allowed: 0 or more")
        self.values[name] = float(value)
        getattr(self, name).fill_(value)
