"""Blocks whose weights several layers share, and what each layer adds to use one (Zamba2, arXiv 2411.15242).

B batch, S sequence, H hidden, R rank of adapters, F width of the MLP.
"""

import torch
from torch import Tensor, nn

from te_models.layers.module.linear import Linear

from ..config import ModelConfig, SharedBlocksConfig
from .build import Build, make_norm, output_init_method
from .cache import LayerMemory
from .mixers import MixerInputs, attention_class
from .mixers.attention import SelfAttention
from .mixers.convolved import HighPrecisionLinear
from .mlp import MLP


class SharedBlock(nn.Module):
    """Attention whose input has 2 H channels, and an MLP, without residual connections. layer: the first that uses it,
    whose attention it has."""

    def __init__(self, config: ModelConfig, layer: int, build: Build) -> None:
        super().__init__()
        attention = config.attention_of(layer)
        assert attention is not None and attention_class(attention) is SelfAttention, "checked by the configuration"
        wide = 2 * config.hidden_size
        self.input_layernorm = make_norm(config.norm, wide, build)
        self.self_attention = SelfAttention(config, attention, layer, build, normed=False, in_features=wide)
        self.pre_mlp_layernorm = make_norm(config.norm, config.hidden_size, build)
        self.mlp = MLP(config, config.mlp.ffn_hidden_size, config.mlp.bias, build, normed=False)


class SharedUse(nn.Module):
    """What a layer adds to use a shared block: adapters, and the projection of the result."""

    def __init__(self, config: ModelConfig, shared: SharedBlocksConfig, layer: int, build: Build) -> None:
        super().__init__()
        attention, hidden, rank = config.attention_of(layer), config.hidden_size, shared.lora_rank
        assert attention is not None, "checked by the configuration"
        self.rank = rank
        own = attention.qkv_rows() if shared.attention_lora else ()
        self.qkv_down = HighPrecisionLinear(config, 3 * rank, 2 * hidden, build, whole=True) if own else None
        self.qkv_up = nn.ModuleList(HighPrecisionLinear(config, rows, rank, build) for rows in own)
        joins = 2 if config.mlp.gated else 1
        self.fc1_down = HighPrecisionLinear(config, rank, hidden, build, whole=True)
        self.fc1_up = HighPrecisionLinear(config, config.mlp.ffn_hidden_size * joins, rank, build, joins=joins)
        self.linear_out = Linear(hidden, hidden, False, **build.gemm(output_init_method(config)))

    def forward(
        self, block: SharedBlock, x: Tensor, embedded: Tensor, inputs: MixerInputs, cache: LayerMemory | None
    ) -> Tensor:
        """x, embedded: [B, S, H], the layer's input and the model's embeddings -> [B, S, H], what is added to x."""
        normed = block.input_layernorm(torch.cat((x, embedded), -1))
        adapted, split = None, block.mlp.linear_fc2
        if self.qkv_down is not None:
            parts = split.for_own_features(self.qkv_down(normed)).split(self.rank, -1)
            adapted = torch.cat([up(part) for up, part in zip(self.qkv_up, parts, strict=True)], -1)
        y = block.self_attention(normed, inputs, cache, adapted)
        assert isinstance(y, Tensor), "no later layer reads its keys"
        y = block.pre_mlp_layernorm(y)
        y = block.mlp(y, self.fc1_up(split.for_own_features(self.fc1_down(y))))
        return self.linear_out(y)
