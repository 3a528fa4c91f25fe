"""Multi-token prediction: layers behind the model that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437,
section 2.2), for training, and as drafts of speculative decoding.

Depth k (from 1) reads at position i the hidden state of depth k - 1, that of depth 0 being what the model gives to its
output layer, and the embedding of token i + k; it predicts token i + k + 1 through the model's own output layer.

Where ranks share tokens, a rank has the hidden states of its tokens, [B, S / ranks, H] or [T / ranks, H], and gathers
the embeddings of all tokens, because the tokens ahead may be on other ranks.

B batch, S sequence, T tokens, H hidden, V vocabulary.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.kernels.gemm import linear
from te_models.kernels.without_autocast import compute_dtype, without_autocast
from te_models.layers.distributed.context_parallel import ContextShard, gather_positions, own_positions
from te_models.layers.distributed.sequence_parallel import gather_tokens_of_ranks, norm_own_tokens, own_tokens
from te_models.layers.distributed.tensor_parallel import with_summed_gradient

from ..config import ModelConfig
from .build import Build, init_method, make_norm
from .decoder import Decoder, LayerInputs
from .layer import DecoderLayer
from .moe import MoELayer, RouterOutput
from .output import OutputLayer


class Projection(nn.Module):
    """The projection that joins embedding and hidden state. weight: [H, 2 H]. In high precision under every recipe, as
    published FP8 files store it."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.init_method = init_method(config)
        self.sequence_shard = build.sequence_shard
        self.weight = build.parameter(config.hidden_size, 2 * config.hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again."""
        self.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, 2 H] -> [B, S, H], or of a rank's tokens alone; then the gradient of the weight is summed over the
        ranks."""
        dtype, shard = compute_dtype(x), self.sequence_shard
        weight = self.weight if shard is None else with_summed_gradient(self.weight, shard.group)
        x = x.to(dtype)
        with without_autocast(x):
            return linear(x, weight.to(dtype), None)


class MultiTokenPredictionLayer(nn.Module):
    """One depth. Megatron-Core: `MultiTokenPredictionLayer`, same parameter names. Its transformer layer is of the kind
    of the model's last one."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.sequence_shard = build.sequence_shard
        self.enorm = make_norm(config.norm, config.hidden_size, build)
        self.hnorm = make_norm(config.norm, config.hidden_size, build)
        self.eh_proj = Projection(config, build)
        self.transformer_layer = DecoderLayer(config, config.num_layers - 1, build)
        self.final_layernorm = make_norm(config.norm, config.hidden_size, build)

    def forward(
        self, hidden: Tensor, embedded: Tensor, decoder: Decoder, inputs: LayerInputs, recompute: bool = False
    ) -> tuple[Tensor, RouterOutput | None, Tensor | None]:
        """hidden: [B, S, H], of the depth before; embedded: [B, S, H], of the tokens that follow it -> [B, S, H], what
        the router decided, and the loss of an indexer that is trained."""
        # published weights expect the embedding first, although the paper writes it second
        x = self.eh_proj(torch.cat([self._normed(self.enorm, embedded), self._normed(self.hnorm, hidden)], dim=-1))
        x, decided, *selections = decoder.run_layer(self.transformer_layer, -1, x, inputs, recompute=recompute)
        loss = selections[0].loss if selections else None
        return self._normed(self.final_layernorm, x), decided, loss

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm_own_tokens(norm, x, self.sequence_shard)


class MTPOutput(NamedTuple):
    """loss: float32 scalar, the mean over depths of their cross entropies; routed: what the routers of the depths
    decided; index_losses: the weighted losses of their indexers that are trained."""

    loss: Tensor
    routed: list[RouterOutput]
    index_losses: list[Tensor]


class MultiTokenPrediction(nn.Module):
    """All depths of a model. Megatron-Core: `MultiTokenPredictionBlock`."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.sequence_shard = build.sequence_shard
        self.context_shard: ContextShard | None = None
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
        input of the first layer, both of a rank's tokens where ranks share them; labels: [B, S]. A prediction counts
        where its label does, and where its position and the tokens that its embeddings are of belong to one of `texts`,
        see `labels_of_depth`."""
        recompute = decoder.activation_checkpointing and torch.is_grad_enabled()
        embedded = self._of_all_tokens(embedded, labels.shape[0])
        losses, routed, index_losses = [], [], []
        for depth, layer in enumerate(self.layers, 1):
            ahead = inputs._replace(token_mask=self._followed(inputs.token_mask, labels, depth))
            following = self._own(_shifted(embedded, depth))
            hidden, decided, index_loss = layer(hidden, following, decoder, ahead, recompute)
            targets = labels_of_depth(labels, texts, depth)
            _, loss, _ = output_layer(hidden, shared_weight, targets, return_logits=False, batch_size=inputs.batch_size)
            assert loss is not None
            losses.append(loss)
            if index_loss is not None:
                index_losses.append(index_loss)
            if decided is not None:
                mlp = cast(MultiTokenPredictionLayer, layer).transformer_layer.mlp
                assert isinstance(mlp, MoELayer)
                mlp.router.count(decided)
                routed.append(decided)
        return MTPOutput(torch.stack(losses).mean(), routed, index_losses)

    def _of_all_tokens(self, embedded: Tensor, batch_size: int) -> Tensor:
        """Return embeddings [B, S, H] of a rank's tokens."""
        if self.sequence_shard is not None:
            embedded = gather_tokens_of_ranks(embedded, self.sequence_shard).unflatten(0, (batch_size, -1))
        return embedded if self.context_shard is None else gather_positions(embedded, self.context_shard)

    def _own(self, embedded: Tensor) -> Tensor:
        """Return this rank's part of embeddings [B, S, H]."""
        own = own_positions(embedded, self.context_shard)
        return own if self.sequence_shard is None else own_tokens(own.flatten(0, 1), self.sequence_shard)

    def _followed(self, token_mask: Tensor | None, labels: Tensor, depth: int) -> Tensor:
        """Return bool, true where a token that is no padding is followed by `depth` others: routers count these. [B, S]
        of labels [B, S]; of shared sequences, as token_mask, of this rank's positions."""
        batch, length = labels.shape
        followed = (torch.arange(length, device=labels.device) < length - depth).expand(batch, -1)
        followed = own_positions(followed, self.context_shard)
        return followed if token_mask is None else followed & token_mask


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
