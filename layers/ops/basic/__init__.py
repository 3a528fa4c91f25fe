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
from .collectives import AllGather, AllReduce, ReduceScatter
from .elementwise import AddExtraInput, Bias, ConstantScale, Dropout, Identity, MakeExtraOutput, Reshape
from .grouped_linear import GroupedLinear
from .linear import BasicLinear, Quantize
from .norm import L2Norm, LayerNorm, RMSNorm

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
