"""The class of each format's tensors, by which users name it and files are read back."""

import json
import sys
from typing import Any

import torch
from torch import nn

from ..quantizer import Fields, Quantizer
from ..quantizer.tensor_types import TENSOR_TYPES
from .quantized_tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """`Float8TensorStorage` as a tensor."""


class Float8BlockwiseTensor(QuantizedTensor):
    """`Float8BlockwiseTensorStorage` as a tensor."""


class MXFP8Tensor(QuantizedTensor):
    """`MXFP8TensorStorage` as a tensor."""


class NVFP4Tensor(QuantizedTensor):
    """`NVFP4TensorStorage` as a tensor."""


class Int4Tensor(QuantizedTensor):
    """`Int4TensorStorage` as a tensor."""


class Int8Tensor(QuantizedTensor):
    """`Int8TensorStorage` as a tensor."""


class IdentityTensor(QuantizedTensor):
    """`IdentityTensorStorage` as a tensor."""


class HybridTensor(QuantizedTensor):
    """`HybridTensorStorage` as a tensor."""


TENSOR_CLASSES: dict[str, type[QuantizedTensor]] = {
    "float8": Float8Tensor,
    "float8_block": Float8BlockwiseTensor,
    "mxfp8": MXFP8Tensor,
    "nvfp4": NVFP4Tensor,
    "int4": Int4Tensor,
    "int8": Int8Tensor,
    "identity": IdentityTensor,
    "hybrid": HybridTensor,
}
"""Format -> the class of one matrix; of a format without one `QuantizedTensor`."""
TENSOR_TYPES.update({**TENSOR_CLASSES, "": QuantizedTensor})

CLASSES: dict[str, type[QuantizedTensor]] = {c.__name__: c for c in (*TENSOR_CLASSES.values(), QuantizedTensor)}
"""Class name -> class, of everything that can be saved."""


def rebuild_quantized(
    name: str,
    quantizer: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    inner: Fields,
    flags: tuple[bool, bool],
    marks: dict[str, Any] | None = None,
) -> QuantizedTensor:
    """Return the tensor that `QuantizedTensor.__reduce_ex__` described. ValueError where the parts do not fit.

    marks: what users have set on a parameter. Reads data and never runs code from the file, so it is registered as safe
    for torch.load(weights_only=True).
    """
    if name not in CLASSES:
        raise ValueError(f"the quantized tensor has class {name!r}; allowed: {', '.join(CLASSES)}")
    value = Quantizer.from_dict(json.loads(quantizer))
    tensor = CLASSES[name].rebuild(inner, value, torch.Size(shape), dtype)
    requires_grad, is_parameter = flags
    rebuilt: Any = nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
    for mark, value in (marks or {}).items():
        vars(rebuilt).setdefault(mark, value)  # never one of the tensor's fields
    return rebuilt


# Saved files name the function so, whatever module it moves to.
rebuild_quantized.__module__ = "te_models.layers.tensor_classes"
sys.modules[rebuild_quantized.__module__] = sys.modules[__name__]
torch.serialization.add_safe_globals([rebuild_quantized])
