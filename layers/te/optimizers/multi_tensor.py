"""Transformer Engine's functions of lists of tensors that scripts clip gradients with: their norm, and scaling them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optimizers.norm import tensor_norm


class MultiTensorApply:
    """Calls a function of lists of tensors. chunk_size: how a CUDA kernel cuts them; numbers do not depend on it."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """Return `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""Calls `multi_tensor_l2norm` and `multi_tensor_scale` as Transformer Engine's scripts do."""


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (the 2-norm of all tensors of the one list together, float32 [1]; with per_tensor the norm of each, [n],
    else [0]). noop_flag: an integer tensor [1], set to 1 where the norm is infinite or NaN."""
    (tensors,) = tensor_lists
    device = tensors[0].device if tensors else noop_flag.device
    norms = [tensor_norm(tensor) for tensor in tensors]
    each = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float32, device=device)
    total = torch.linalg.vector_norm(each).reshape(1)
    noop_flag.copy_(torch.where(total.isfinite().to(noop_flag.device), noop_flag, 1))
    return total, each if per_tensor else each.new_zeros(0)


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    """Write `scale` times each tensor of the first list to its place in the second; both may be the same list.

    noop_flag: an integer tensor [1], set to 1 where a number read is infinite or NaN.
    """
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        finite = source.isfinite().all().to(noop_flag.device)
        target.copy_(source.float() * scale)
        noop_flag.copy_(torch.where(finite, noop_flag, 1))
