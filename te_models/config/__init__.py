"""The model configuration: one frozen value that says everything about a model's mathematics.

Why one generic configuration: every supported family is a choice of the same few parts (norm, attention, rotary
embedding, MLP, mixture of experts, residual block), so a family is a value of this class, never a model class.
Megatron-Core's field names are used where it has one. Alternatives rejected: one class per family (the parts drift
apart), a flat class (60 fields whose dependencies nobody can check).

A leaf: it imports nothing else of the project, so every folder may read it.
"""

from .describe import mixer_words
from .embedding import EmbeddingConfig, NormConfig
from .mixers import (
    KINDS,
    AttentionConfig,
    CompressedConfig,
    GatedDeltaConfig,
    IndexerConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    MixerConfig,
    MLAConfig,
    ShortConvolutionConfig,
    TemperatureConfig,
)
from .mlp import MLPConfig, MoEConfig, RouterConfig
from .model import LayerType, ModelConfig
from .part import ConfigError, ConfigPart, check
from .residual import (
    AlternatingUpdatesConfig,
    DeepNormConfig,
    HyperConnectionConfig,
    PerLayerEmbeddingConfig,
    has_compressed_keys,
    reads_tokens,
)
from .rope import RopeConfig
from .shared import SharedBlocksConfig

__all__ = [
    "KINDS",
    "AlternatingUpdatesConfig",
    "AttentionConfig",
    "CompressedConfig",
    "ConfigError",
    "ConfigPart",
    "DeepNormConfig",
    "EmbeddingConfig",
    "GatedDeltaConfig",
    "HyperConnectionConfig",
    "IndexerConfig",
    "LayerType",
    "LightningConfig",
    "MLAConfig",
    "MLPConfig",
    "Mamba2Config",
    "MambaConfig",
    "MixerConfig",
    "MoEConfig",
    "ModelConfig",
    "NormConfig",
    "PerLayerEmbeddingConfig",
    "RopeConfig",
    "RouterConfig",
    "SharedBlocksConfig",
    "ShortConvolutionConfig",
    "TemperatureConfig",
    "check",
    "has_compressed_keys",
    "mixer_words",
    "reads_tokens",
]
