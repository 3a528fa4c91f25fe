"""What launchers of Triton kernels share, and where they run."""

from __future__ import annotations

import torch


def on_accelerator(x: torch.Tensor) -> bool:
    """Whether kernels serve x, for quantization; elsewhere the reference does."""
    return x.is_cuda


def multiprocessors(device: torch.device) -> int:
    """Return how many programs of a device run side by side; 2 for the CPU, where Triton's interpreter runs them."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., C] as [rows, C], also where C is 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
