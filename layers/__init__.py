"""The Transformer-Engine-style layer set: recipes, quantizers, quantized tensors, and the modules that use them.

May import: `te_models.kernels`.
"""

from .attention import DotProductAttention
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
]
