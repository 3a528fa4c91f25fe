"""The Transformer-Engine-style layer set: recipes, quantizers, quantized tensors, and the modules that use them.

May import: `te_models.kernels`.
"""

from .attention import DotProductAttention
from .autocast import autocast, current_recipe, quantized_model_init
from .grouped_linear import GroupedLinear
from .grouped_tensor import GroupedTensor
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .quantized_tensor import Float8BlockwiseTensor, Float8Tensor, MXFP8Tensor, QuantizedTensor
from .quantizer import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer
from .recipe import RECIPES, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe, recipe

__all__ = [
    "RECIPES",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseTensor",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Tensor",
    "Format",
    "GroupedLinear",
    "GroupedTensor",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "QuantizedTensor",
    "Quantizer",
    "RMSNorm",
    "Recipe",
    "autocast",
    "current_recipe",
    "quantized_model_init",
    "recipe",
]
