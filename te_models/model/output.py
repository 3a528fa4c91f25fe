"""The end of the model: output layer, loss, and the value a forward call returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from te_models.kernels.cross_entropy import cross_entropy, linear_cross_entropy, output_logits, shift_labels
from te_models.layers.functional.gemm_operand import compute_dtype
from te_models.layers.functional.wgrad import main_grad_of

from ..config import ModelConfig
from .build import Build, init_method
from .constants import ConstantModule


@dataclass
class ModelOutput:
    """The result of a model call. A field that was not requested, or does not apply, is None.

    logits: [B, S, V] in the compute dtype. loss: float32 scalar, the mean cross entropy of the labels plus aux_loss.
    aux_loss: float32 scalar, the weighted router losses of all layers as they enter the loss (0 without such losses).
    load_balancing_loss, z_loss: float32 scalars, unweighted means over the MoE layers, for monitoring.
    tokens_per_expert: [MoE layers, E] int64.
    hidden_states: [B, S, H] each: the embeddings, the output of each layer but the last, and the output of the last
    layer after the final norm.
    """

    logits: Tensor | None = None
    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    load_balancing_loss: Tensor | None = None
    z_loss: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


# torch.export flattens what a program returns
register_dataclass(ModelOutput, serialized_type_name="te_models.ModelOutput")


class OutputLayer(nn.Module):
    """The vocabulary projection. weight: [V, H], absent when shared with the embedding; bias: [V].

    Not a `te_models.layers.Linear`: it stays in high precision under every recipe, and its GEMM belongs to the loss.

    loss_chunk_tokens: set it to compute a loss without logits from the logits of so many tokens at a time. Memory then
    no longer grows with tokens x vocabulary: 8192 tokens, H 576, V 49152 in bfloat16 on CPU by 512 take 223 MB instead
    of 844, and about a fifth more time. None: all tokens at once, as good up to some 2000 tokens.

    fuse_wgrad_accumulation: set it to add the weight's gradient to `weight.main_grad`, as in `te_models.layers.Linear`.
    """

    loss_chunk_tokens: int | None = None
    fuse_wgrad_accumulation = False

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config = config.embedding
        self.init_method = init_method(config)
        shared = config.embedding.share_embeddings_and_output_weights
        self.weight = None if shared else build.parameter(config.vocab_size, config.hidden_size)
        self.bias = build.parameter(config.vocab_size) if config.embedding.output_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again."""
        if self.weight is not None:
            self.init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def forward(
        self, x: Tensor, shared_weight: Tensor | None, labels: Tensor | None, *, return_logits: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """x: [B, S, H]; shared_weight: the embedding's [V, H], of a layer that has none; labels: [B, S].

        Returns (logits [B, S, V] or None, loss or None). Without logits the loss never holds them in float32. Raises
        ValueError where the weight has no data, with which torch would multiply, and return any numbers.
        """
        dtype = compute_dtype(x)
        weight = self.weight if shared_weight is None else shared_weight
        assert weight is not None, "shared, or the layer's own"
        if weight.is_meta and not x.is_meta:
            raise ValueError(
                "the output layer shares the embedding's weight, which is on the meta device; allowed: a model whose "
                "embedding is not offloaded"
            )
        main_grad = main_grad_of(weight, self.fuse_wgrad_accumulation)
        weight = weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        scaled: dict[str, Any] = {"multiplier": self.config.logits_multiplier, "softcap": self.config.logits_softcap}
        scaled["main_grad"] = main_grad
        x = x.to(dtype)
        targets = None if labels is None else shift_labels(labels).flatten()
        if not return_logits:
            if targets is None:
                return None, None
            chunk = self.loss_chunk_tokens
            return None, linear_cross_entropy(x.flatten(0, 1), weight, targets, bias, chunk_tokens=chunk, **scaled)
        logits = output_logits(x, weight, bias, **scaled)
        return logits, None if targets is None else cross_entropy(logits.flatten(0, 1), targets)


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
