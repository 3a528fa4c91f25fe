"""What launchers of Triton kernels share, and where they run."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .backend import definitions_only

as_accelerator = False
"""Whether quantization, and cross entropy of shards, run the kernels of an accelerator on any device; tests do so, in
Triton's interpreter."""


def on_accelerator(x: Tensor) -> bool:
    """Whether kernels serve x that run on any device under `as_accelerator`; elsewhere the reference does."""
    return (x.is_cuda or as_accelerator) and not definitions_only()


def multiprocessors(device: torch.device) -> int:
    """Return how many programs of a device run side by side; 2 for the CPU, where Triton's interpreter runs them."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Return how many bytes of a GPU's shared memory one program can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # pyright: ignore[reportAttributeAccessIssue]


def as_matrix(x: Tensor) -> Tensor:
    """Return x [..., C] as [rows, C], also where C is 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def on_gpu_of_arguments(function: Callable) -> Callable:
    """Return function, run with the GPU of its arguments' tensors as the current one, as torch runs its own operations:
    Triton starts a kernel on the current GPU, wherever its tensors are."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with torch.cuda.device(_gpu_of(args)):
            return function(*args)

    return run


def _gpu_of(args: Iterable[Any]) -> torch.device | None:
    """Return the device of the first tensor on a GPU, also inside lists; None without such a tensor."""
    for arg in args:
        found = arg.device if isinstance(arg, Tensor) and arg.is_cuda else None
        if isinstance(arg, (list, tuple)):
            found = _gpu_of(arg)
        if found is not None:
            return found
    return None
