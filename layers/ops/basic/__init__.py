"""The basic operations, one differentiable step each."""

from .activation import (
    GEGLU,
    GELU,
    ActivationOperation,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledGEGLU,
    ScaledGLU,
    ScaledSwiGLU,
    SiLU,
    SReLU,
    SwiGLU,
)
from .bias import Bias
from .elementwise import ConstantScale, Dropout, Identity, Reshape
from .extra import AddExtraInput, MakeExtraOutput
from .linear import BasicLinear
from .norm import L2Norm, LayerNorm, RMSNorm
from .quantize import Quantize

__all__ = [
    "GEGLU",
    "GELU",
    "ActivationOperation",
    "AddExtraInput",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "Identity",
    "L2Norm",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReLU",
    "ScaledGEGLU",
    "ScaledGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SwiGLU",
]
