"""Refuse conversions that turn a finite number into an infinite one: bfloat16 reaches 3e38, float16 65504.

Checked where conversions write, a buffer at a time: a maximum costs little beside the conversion itself, and only
float16 made of something wider needs it.
"""

from __future__ import annotations

import torch

from .errors import CheckpointError


def check_converted(found: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Raise CheckpointError naming the tensor `name` if `found`, made of `values`, is infinite where these are not."""
    if found.dtype != torch.float16 or values.dtype == torch.float16 or not found.isinf().any():
        return
    lost = values[found.isinf() & values.isfinite()]
    if lost.numel():
        raise CheckpointError(
            f"{name} has the value {float(lost[0]):.6g}, which float16 cannot hold (at most 65504); choose bfloat16 or "
            "float32"
        )


def check_decoded(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return the values of a quantized weight; raise CheckpointError naming it if float16 is too narrow for them."""
    if values.dtype == torch.float16 and values.isinf().any():
        raise CheckpointError(f"{name} has values that float16 cannot hold (at most 65504); choose bfloat16 or float32")
    return values
