"""Fusible operations: small differentiable steps that `Sequential` fuses, with quantized data between them.

May import: `te_models.kernels` and the rest of `te_models.layers`.
"""

from .basic import (
    GEGLU,
    GELU,
    ActivationOperation,
    AddExtraInput,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    Identity,
    L2Norm,
    LayerNorm,
    MakeExtraOutput,
    Quantize,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    ScaledGEGLU,
    ScaledGLU,
    ScaledSwiGLU,
    SiLU,
    SReLU,
    SwiGLU,
)
from .call import (
    Computed,
    Gradients,
    Needs,
    OperationArguments,
    OperationCall,
    OperationContext,
    QuantizedRows,
)
from .fused import FUSIONS
from .fuser import OperationFuser
from .linear import Linear
from .operation import BasicOperation, FusedOperation, FusibleOperation
from .sequential import Sequential

__all__ = [
    "FUSIONS",
    "GEGLU",
    "GELU",
    "ActivationOperation",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "Computed",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "Gradients",
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
    "Reshape",
    "SReLU",
    "ScaledGEGLU",
    "ScaledGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]
