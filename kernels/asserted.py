"""A condition on values that a device computes, checked where it runs: nobody waits for it."""

from __future__ import annotations

import torch
from torch import Tensor


def asserted(condition: Tensor, message: str) -> None:
    """Raise RuntimeError with `message` where condition, [] bool, is false: eagerly, in compiled code and in exported
    programs. On an accelerator the error comes from a later call."""
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]
