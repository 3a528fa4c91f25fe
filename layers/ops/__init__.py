"""Fusible operations: small differentiable steps that `Sequential` fuses, with quantized data between them.

They live in `..te.ops`; `te.ops`, as Transformer Engine's scripts call it, has their names.
"""

from typing import Any

from ..te.names import missing_operation
from ..te.ops.basic.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ActivationOperation,
    ClampedSwiGLU,
    GatedActivation,
    ReGLU,
    ReLU,
    ScaledActivation,
    ScaledClampedQGeGLU,
    ScaledGEGLU,
    ScaledGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from ..te.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from ..te.ops.basic.elementwise import AddExtraInput, Bias, ConstantScale, Dropout, Identity, MakeExtraOutput, Reshape
from ..te.ops.basic.grouped_linear import GroupedLinear
from ..te.ops.basic.linear import BasicLinear, Linear, Quantize
from ..te.ops.basic.norm import L2Norm, LayerNorm, RMSNorm
from ..te.ops.call import (
    Computed,
    Gradients,
    Needs,
    OperationArguments,
    OperationCall,
    OperationContext,
    QuantizedRows,
)
from ..te.ops.fused import FUSIONS
from ..te.ops.fuser import OperationFuser
from ..te.ops.operation import BasicOperation, FusedOperation, FusibleOperation
from ..te.ops.sequential import Sequential

__all__ = [
    "FUSIONS",
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ActivationOperation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "Computed",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GatedActivation",
    "Gradients",
    "GroupedLinear",
    "Identity",
    "L2Norm",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "Needs",
    "OperationArguments",
    "OperationCall",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "QuantizedRows",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledActivation",
    "ScaledClampedQGeGLU",
    "ScaledGEGLU",
    "ScaledGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_operation(name))
