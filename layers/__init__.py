"""The Transformer-Engine-style layer set: recipes, quantizers, quantized tensors, and the modules that use them.

May import: `te_models.kernels`.
"""

import importlib
from typing import Any

from .attention import DotProductAttention
from .autocast import (
    autocast,
    collect_statistics,
    current_recipe,
    microbatch,
    quantized_model_init,
    recompute_contexts,
    storage_recipe,
)
from .delayed import Float8Quantizer
from .delayed_update import update_delayed_scaling
from .fsdp import share_scales
from .fused_adamw import FusedAdamW, gradient_of
from .grouped_linear import GroupedLinear
from .grouped_storage import GroupedTensorStorage
from .grouped_tensor import GroupedRows, GroupedTensor
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .moe_permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .multihead_attention import MultiheadAttention
from .norm import LayerNorm, RMSNorm
from .op_results import QuantizedResult, quantized_like
from .overrides import PerModuleRecipe, first_last_layers_bf16
from .parallel_cross_entropy import parallel_cross_entropy
from .quantized_module import QuantizedModule
from .quantized_storage import (
    Float8BlockwiseTensorStorage,
    Float8TensorStorage,
    HybridTensorStorage,
    IdentityTensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedStorage,
)
from .quantized_tensor import QuantizedTensor
from .quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    FP8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .recipe import RECIPES, Format, GemmQuantizers, QuantizerRole, Recipe, recipe
from .recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .recompute import checkpoint
from .report import RecipeReport, quantization_statistics, recipe_report
from .rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from .stored_weight import store_weights
from .te_names import (
    fp8_autocast,
    fp8_model_init,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    missing,
)
from .tensor_classes import (
    Float8BlockwiseTensor,
    Float8Tensor,
    HybridTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
)
from .transformer_layer import TransformerLayer
from .whole_model import (
    cache_weights,
    default_rounding_seed,
    load_recipe_state,
    name_modules,
    prepare_recipe_state,
    recipe_state,
    set_rounding_seed,
)

__all__ = [
    "RECIPES",
    "CustomRecipe",
    "DelayedScaling",
    "DotProductAttention",
    "FP8Quantizer",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseTensor",
    "Float8BlockwiseTensorStorage",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "FusedAdamW",
    "GemmQuantizers",
    "GroupedLinear",
    "GroupedRows",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HybridQuantizer",
    "HybridTensor",
    "HybridTensorStorage",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MultiheadAttention",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "PerModuleRecipe",
    "QuantizedModule",
    "QuantizedResult",
    "QuantizedStorage",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "Recipe",
    "RecipeReport",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "cache_weights",
    "checkpoint",
    "collect_statistics",
    "current_recipe",
    "default_rounding_seed",
    "first_last_layers_bf16",
    "fp8_autocast",
    "fp8_model_init",
    "gradient_of",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "load_recipe_state",
    "microbatch",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "name_modules",
    "parallel_cross_entropy",
    "prepare_recipe_state",
    "quantization_statistics",
    "quantized_like",
    "quantized_model_init",
    "recipe",
    "recipe_report",
    "recipe_state",
    "recompute_contexts",
    "set_rounding_seed",
    "share_scales",
    "storage_recipe",
    "store_weights",
    "update_delayed_scaling",
]


def __getattr__(name: str) -> Any:
    if name == "ops":  # a package of its own, which not every program needs
        return importlib.import_module(f"{__name__}.ops")
    raise AttributeError(missing(name))
