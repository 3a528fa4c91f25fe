"""The Transformer-Engine-style layer set: recipes, quantizers, quantized tensors, and the modules that use them.

May import: `te_models.kernels`.
"""

import importlib
from typing import Any

from .dynamo.custom_op import QuantizedResult, quantized_like
from .module.autocast import (
    autocast,
    collect_statistics,
    current_recipe,
    microbatch,
    quantized_model_init,
    storage_recipe,
)
from .module.base import QuantizedModule
from .module.delayed_scaling import update_delayed_scaling
from .module.model_state import (
    cache_weights,
    default_rounding_seed,
    load_recipe_state,
    name_modules,
    prepare_recipe_state,
    recipe_state,
    set_rounding_seed,
)
from .module.primary_weights import store_weights
from .module.report import RecipeReport, quantization_statistics, recipe_report
from .optimizers.fused_adamw import FusedAdamW
from .optimizers.master_weights import GradScaler, gradient_of
from .quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    FP8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Int4Quantizer,
    Int8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .quantizer.delayed import Float8Quantizer
from .recipe.activation_checkpoint import recompute_contexts
from .recipe.base import RECIPES, Format, GemmQuantizers, QuantizerRole, Recipe, recipe
from .recipe.per_module import PerModuleRecipe, first_last_layers_bf16
from .recipe.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .te import flat_fields as flat_fields_arguments  # noqa: F401 (what constructors take)
from .te import quantizers as quantizer_arguments  # noqa: F401
from .te.arguments import DType
from .te.attention.dot_product_attention import DotProductAttention
from .te.attention.multihead_attention import MultiheadAttention
from .te.attention.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from .te.attention.transformer_layer import TransformerLayer
from .te.checkpoint import checkpoint
from .te.cross_entropy import parallel_cross_entropy
from .te.global_state import FP8GlobalStateManager
from .te.grouped import bgrad_group_quantize, group_quantize
from .te.mixed_shapes import MixedShapesStorage
from .te.module.grouped_linear import GroupedLinear
from .te.module.layernorm_linear import LayerNormLinear
from .te.module.layernorm_mlp import LayerNormMLP
from .te.module.linear import Linear
from .te.module.norm import LayerNorm, RMSNorm
from .te.names import (
    fp8_autocast,
    fp8_model_init,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    missing,
)
from .te.padding import Fp8Padding, Fp8Unpadding
from .te.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .te.replace_linears import ReplacementReport, replace_linears
from .te.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from .te.state import DelayedScalingRecipeState, RecipeState
from .tensor import averages as tensor_averages  # noqa: F401 (what torch does out of an operation's sight)
from .tensor import collectives as tensor_collectives  # noqa: F401
from .tensor.formats import (
    Float8BlockwiseTensor,
    Float8Tensor,
    HybridTensor,
    IdentityTensor,
    Int4Tensor,
    Int8Tensor,
    MXFP8Tensor,
    NVFP4Tensor,
)
from .tensor.fsdp import share_scales
from .tensor.grouped_storage import GroupedTensorStorage
from .tensor.grouped_tensor import GroupedRows, GroupedTensor
from .tensor.quantized_tensor import QuantizedTensor
from .tensor.storage import (
    Float8BlockwiseTensorStorage,
    Float8TensorStorage,
    HybridTensorStorage,
    IdentityTensorStorage,
    Int4TensorStorage,
    Int8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedStorage,
)

__all__ = [
    "RECIPES",
    "CustomRecipe",
    "DType",
    "DelayedScaling",
    "DelayedScalingRecipeState",
    "DotProductAttention",
    "FP8GlobalStateManager",
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
    "Fp8Padding",
    "Fp8Unpadding",
    "FusedAdamW",
    "GemmQuantizers",
    "GradScaler",
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
    "Int4Quantizer",
    "Int4Tensor",
    "Int4TensorStorage",
    "Int8Quantizer",
    "Int8Tensor",
    "Int8TensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MixedShapesStorage",
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
    "RecipeState",
    "ReplacementReport",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "bgrad_group_quantize",
    "cache_weights",
    "checkpoint",
    "collect_statistics",
    "current_recipe",
    "default_rounding_seed",
    "first_last_layers_bf16",
    "fp8_autocast",
    "fp8_model_init",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "gradient_of",
    "group_quantize",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "load_recipe_state",
    "microbatch",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
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
    "replace_linears",
    "set_rounding_seed",
    "share_scales",
    "storage_recipe",
    "store_weights",
    "update_delayed_scaling",
]


def __getattr__(name: str) -> Any:
    if name in ("ops", "optimizers", "utils"):  # packages that not every program needs
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(name))
