"""What the tensor tests share: every format's weight quantizer, and comparison bit for bit."""

from __future__ import annotations

import torch

from te_models.layers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
)
from te_models.layers.quantizer import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer


def weight_quantizers() -> dict[str, Quantizer]:
    """A quantizer per format and variant, by a short name."""
    return {
        "float8": Float8CurrentScalingQuantizer(),
        "float8_block": Float8BlockQuantizer(),
        "float8_block_1d": Float8BlockQuantizer(block_scaling_dim=1),
        "mxfp8": MXFP8Quantizer(),
        "mxfp8_2d": MXFP8Quantizer(two_dimensional=True),
        "nvfp4": NVFP4Quantizer(with_2d_quantization=True),
        "nvfp4_1d": NVFP4Quantizer(),
        "identity": IdentityQuantizer(),
        "hybrid": HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=Float8BlockQuantizer()),
    }


def in_dtype(x: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """The same fields with another logical dtype, as a converted module has them."""
    return x.map_fields(lambda field: field, dtype)


def raw(field: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return field.detach().contiguous().flatten().view(torch.uint8)


def same_bits(a: QuantizedTensor, b: QuantizedTensor | dict[str, torch.Tensor]) -> bool:
    """Whether two quantized tensors, or a tensor and fields, have the same fields."""
    other = b.fields if isinstance(b, QuantizedTensor) else b
    return a.fields.keys() == other.keys() and all(torch.equal(raw(f), raw(other[n])) for n, f in a.fields.items())
