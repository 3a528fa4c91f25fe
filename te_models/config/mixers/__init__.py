"""Token mixers: what a layer's configuration can name, one file a kind (`ModelConfig.mixers`).

A kind says the shapes of its parameters and of what it carries while it decodes, and its FLOPs: everything that is
known before a model exists. `te_models/model/mixers/` computes.
"""

from .attention import AttentionConfig, MLAConfig, TemperatureConfig
from .base import MixerConfig, Parameter, State
from .compressed import CompressedConfig, check_compressed
from .gated_delta import GatedDeltaConfig
from .indexer import IndexerConfig
from .lightning import LightningConfig
from .mamba import MambaConfig
from .mamba2 import Mamba2Config
from .short_convolution import ShortConvolutionConfig

KINDS: dict[str, type[MixerConfig]] = {
    kind.kind: kind
    for kind in (AttentionConfig, GatedDeltaConfig, LightningConfig, MambaConfig, Mamba2Config, ShortConvolutionConfig)
}
"""The kinds of mixers by the word that a configuration's `kind` has."""

__all__ = [
    "KINDS",
    "AttentionConfig",
    "CompressedConfig",
    "GatedDeltaConfig",
    "IndexerConfig",
    "LightningConfig",
    "MLAConfig",
    "Mamba2Config",
    "MambaConfig",
    "MixerConfig",
    "Parameter",
    "ShortConvolutionConfig",
    "State",
    "TemperatureConfig",
    "check_compressed",
]
