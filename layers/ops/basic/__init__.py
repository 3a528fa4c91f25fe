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
    SReGLU,
    SReLU,
    SwiGLU,
)
from .bias import Bias
from .collectives import AllGather, AllReduce, ReduceScatter
from .elementwise import ConstantScale, Dropout, Identity, Reshape
from .extra import AddExtraInput, MakeExtraOutput
from .grouped_linear import GroupedLinear
from .linear import BasicLinear
from .norm import L2Norm, LayerNorm, RMSNorm
from .quantize import Quantize

__all__ = [
    "GEGLU",
    "GELU",
    "ActivationOperation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Norm",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledGEGLU",
    "ScaledGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SwiGLU",
]
