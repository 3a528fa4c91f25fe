"""Values that a device computes: whether the host may look at them, and conditions that are checked where they are."""

import torch
from torch import Tensor

from .compiling import compiling


def asserted(condition: Tensor, message: str) -> None:
    """Raise RuntimeError with `message` where condition, [] bool, is false: eagerly, in compiled code and in exported
    programs. On an accelerator the error comes from a later call."""
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]


def host_reads(x: Tensor) -> bool:
    """Return whether the host can look at the values of x now, waiting for no device: eagerly, on a CPU."""
    return x.is_cpu and not (torch.compiler.is_compiling() and compiling())
