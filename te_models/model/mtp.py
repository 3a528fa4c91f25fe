"""Multi-token prediction: layers behind the model that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437,
section 2.2), for training, and as drafts of speculative decoding.

Depth k (from 1) reads at position i the hidden state of depth k - 1, that of depth 0 being what the model gives to its
output layer, and the embedding of token i + k; it predicts token i + k + 1 through the model's own output layer.

B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.kernels.gemm import linear
from te_models.kernels.without_autocast import without_autocast
from te_models.layers.functional.gemm_operand import compute_dtype

from ..config import ConfigError, ModelConfig
from .build import Build, init_method, make_norm
from .decoder import Decoder, LayerInputs
from .layer import TransformerLayer
from .moe import MoELayer
from .output import OutputLayer
from .router import RouterOutput


def check_mtp(config: ModelConfig, what: str) -> None:
    """Raise ConfigError where a model with multi-token prediction is to be divided. what: how."""
    if config.mtp_num_layers:
        raise ConfigError(
            f"mtp_num_layers is {config.mtp_num_layers} with {what}; allowed: ranks that each hold the whole model"
        )


class Projection(nn.Module):
    """The projection that joins embedding and hidden state. weight: [H, 2 H]. In high precision under every recipe, as
    published FP8 files store it."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.init_method = init_method(config)
        self.weight = build.parameter(config.hidden_size, 2 * config.hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection anew."""
        self.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, 2 H] -> [B, S, H]."""
        dtype = compute_dtype(x)
        x = x.to(dtype)
        with without_autocast(x):
            return linear(x, self.weight.to(dtype), None)


class MultiTokenPredictionLayer(nn.Module):
    """One depth. Megatron-Core: `MultiTokenPredictionLayer`, same parameter names. Its transformer layer is of the kind
    of the model's last one."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.enorm = make_norm(config.norm, config.hidden_size, build)
        self.hnorm = make_norm(config.norm, config.hidden_size, build)
        self.eh_proj = Projection(config, build)
        self.transformer_layer = TransformerLayer(config, config.num_layers - 1, build)
        self.final_layernorm = make_norm(config.norm, config.hidden_size, build)

    def forward(
        self, hidden: Tensor, embedded: Tensor, decoder: Decoder, inputs: LayerInputs, recompute: bool = False
    ) -> tuple[Tensor, RouterOutput | None]:
        """hidden: [B, S, H], of the depth before; embedded: [B, S, H], of the tokens that follow it -> [B, S, H]."""
        # published weights expect the embedding first, which the paper writes second
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        x, decided = decoder.run_layer(self.transformer_layer, -1, x, inputs, recompute=recompute)
        return self.final_layernorm(x), decided


class MTPOutput(NamedTuple):
    """loss: float32 scalar, the mean over depths of their cross entropies; routed: what the routers of the depths
    decided."""

    loss: Tensor
    routed: list[RouterOutput]


class MultiTokenPrediction(nn.Module):
    """All depths of a model. Megatron-Core: `MultiTokenPredictionBlock`."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiTokenPredictionLayer(config, build) for _ in range(config.mtp_num_layers))

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        labels: Tensor,
        texts: Tensor | None,
        decoder: Decoder,
        inputs: LayerInputs,
        output_layer: OutputLayer,
        shared_weight: Tensor | None,
    ) -> MTPOutput:
        """Return the loss of all depths. hidden: [B, S, H], the input of the output layer; embedded: [B, S, H], the
        input of the first layer; labels: [B, S]. A prediction counts where its label does, and where its position and
        the tokens that its embeddings are of belong to one of `texts`, see `labels_of_depth`."""
        recompute = decoder.activation_checkpointing and torch.is_grad_enabled()
        losses, routed = [], []
        for depth, layer in enumerate(self.layers, 1):
            ahead = inputs._replace(token_mask=_followed(inputs.token_mask, hidden, depth))
            hidden, decided = layer(hidden, _shifted(embedded, depth), decoder, ahead, recompute)
            targets = labels_of_depth(labels, texts, depth)
            _, loss, _ = output_layer(hidden, shared_weight, targets, return_logits=False)
            assert loss is not None
            losses.append(loss)
            if decided is not None:
                mlp = cast(MultiTokenPredictionLayer, layer).transformer_layer.mlp
                assert isinstance(mlp, MoELayer)
                mlp.router.count(decided)
                routed.append(decided)
        return MTPOutput(torch.stack(losses).mean(), routed)


def labels_of_depth(labels: Tensor, texts: Tensor | None, depth: int) -> Tensor:
    """Return labels [B, S] such that position s + 1 has what depth `depth` is scored on at position s, the label of
    s + 1 + depth; -100 where nothing counts. texts: the model's attention_mask, of which [B, S, S] bool tells texts
    apart, or its document_ids [B, S]."""
    shifted = F.pad(labels[:, depth:], (0, min(depth, labels.shape[1])), value=IGNORE_INDEX)
    if texts is None or (texts.dim() != 3 and texts.dtype == torch.bool) or labels.shape[1] <= depth + 1:
        return shifted
    if texts.dim() == 3:
        follows = texts.diagonal(offset=-depth, dim1=1, dim2=2)[:, :-1]  # [B, S - depth - 1]
    else:
        follows = ((texts[:, depth:] == texts[:, :-depth]) & (texts[:, depth:] >= 0))[:, :-1]
    first, scored, rest = shifted.split([1, follows.shape[1], labels.shape[1] - follows.shape[1] - 1], dim=1)
    return torch.cat([first, scored.masked_fill(~follows, IGNORE_INDEX), rest], dim=1)


def _shifted(embedded: Tensor, depth: int) -> Tensor:
    """Return at position i the vector of position i + depth, zeros behind the last one."""
    return F.pad(embedded[:, depth:], (0, 0, 0, min(depth, embedded.shape[1])))


def _followed(token_mask: Tensor | None, hidden: Tensor, depth: int) -> Tensor:
    """Return [B, S] bool, true where a token that is no padding is followed by `depth` others: routers count these."""
    batch, length = hidden.shape[:2]
    followed = (torch.arange(length, device=hidden.device) < length - depth).expand(batch, -1)
    return followed if token_mask is None else followed & token_mask
