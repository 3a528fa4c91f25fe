"""Embeddings of each layer (Gemma 3n), gated into the residual stream behind the MLP.

B batch, S sequence, H hidden, C channels of such an embedding.
"""

import math

import torch
from torch import Tensor, nn

from te_models.kernels.activation import activation
from te_models.kernels.embedding import embedding
from te_models.kernels.norm import rms_norm
from te_models.layers.module.linear import Linear

from ...config import ModelConfig, PerLayerEmbeddingConfig
from ..build import Build, init_method, make_norm
from ..mixers.base import TokenInputs


class PerLayerEmbedding(nn.Module):
    """The embedding of one layer, and how it enters the stream. weight: [V, C], a row for each token.

    The embedding is (norm(project(first layer's input) / sqrt(H)) + sqrt(C) row of the token) / sqrt(2). Every rank
    that splits the layer has all of it.
    """

    def __init__(self, config: ModelConfig, its: PerLayerEmbeddingConfig, build: Build) -> None:
        super().__init__()
        self.words, self.name, self.epsilon = its.vocab_size, config.mlp.activation, config.norm.layernorm_epsilon
        self.cast_order = config.norm.cast_order
        self.padding_idx = config.embedding.padding_idx
        if self.padding_idx is not None and self.padding_idx >= its.vocab_size:
            self.padding_idx = None
        self.init_method, size, channels = init_method(config), config.hidden_size, its.channels
        self.weight = build.parameter(its.vocab_size, channels)
        self.linear_in = Linear(size, channels, False, **build.gemm(self.init_method))
        self.linear_gate = Linear(size, channels, False, **build.gemm(self.init_method))
        self.linear_proj = Linear(channels, size, False, **build.gemm(self.init_method))
        self.layernorm = make_norm(config.norm, size, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows; the projections have their own."""
        self.init_method(self.weight)

    def forward(self, x: Tensor, inputs: TokenInputs) -> Tensor:
        """x: [B, S, H], behind the MLP -> what is added to it."""
        assert inputs.ids is not None and inputs.embedded is not None, "the model has asked for them"
        known = torch.where((inputs.ids >= 0) & (inputs.ids < self.words), inputs.ids, 0)
        rows = embedding(known, self.weight, None, self.padding_idx)
        rows = rows * torch.full((), math.sqrt(rows.shape[-1]), dtype=rows.dtype, device=rows.device)
        projected = self.linear_in(inputs.embedded) * x.shape[-1] ** -0.5
        normed = rms_norm(projected, inputs.norm_weight, self.epsilon, cast_order=self.cast_order)
        gate = activation(self.linear_gate(x), self.name)
        return self.layernorm(self.linear_proj(gate * ((normed + rows) * math.sqrt(0.5))))
