"""te_models: GPT and mixture-of-experts language models on a Transformer-Engine-style layer set.

Names are imported on first use, so `import te_models` costs little. What lives where:
config       ModelConfig and its parts             model        GPTModel, DecoderLayer, MoELayer
generation   generate, stream, drafts              compile      compile_model
parallel     ParallelDims, parallelize             training     train
cli          the command `te-models`
kernels      maths on plain tensors                layers       the layer set and FP8 recipes
checkpoints  Hugging Face and own files
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .compile.compile_model import compile_model
    from .config import (
        AttentionConfig,
        ConfigError,
        EmbeddingConfig,
        MLAConfig,
        MLPConfig,
        ModelConfig,
        MoEConfig,
        NormConfig,
        RopeConfig,
        RouterConfig,
        TemperatureConfig,
    )
    from .generation import Draft, DraftModel, MTPDraft, generate, stream
    from .model import (
        DecoderLayer,
        GPTModel,
        KVCache,
        ModelOutput,
        ModelRefit,
        MoELayer,
        RouterRecord,
        StaticKVCache,
        logprobs,
        take_expert_load,
        update_expert_bias,
    )

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "ConfigError",
    "DecoderLayer",
    "Draft",
    "DraftModel",
    "EmbeddingConfig",
    "GPTModel",
    "KVCache",
    "MLAConfig",
    "MLPConfig",
    "MTPDraft",
    "MoEConfig",
    "MoELayer",
    "ModelConfig",
    "ModelOutput",
    "ModelRefit",
    "NormConfig",
    "RopeConfig",
    "RouterConfig",
    "RouterRecord",
    "StaticKVCache",
    "TemperatureConfig",
    "compile_model",
    "generate",
    "logprobs",
    "stream",
    "take_expert_load",
    "update_expert_bias",
]

# te_models.TransformerLayer promised the constructor of te_models.layers.TransformerLayer, and had another
__getattr__, __dir__ = lazy_names(__name__, "; the layer set is te_models.layers", {"TransformerLayer": "DecoderLayer"})
