"""Which computations run on CPU as they are written, operation by operation.

torch's eager operations on CPU are as fast as the memory that they read and write, but for some that take an element at
a time: comparisons, choices, reductions over short rows, some casts. Where that matters there is a form without them,
with the same bits; the compiler vectorises the definition itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..compiling import compiling

PLAIN = (Tensor, torch.nn.Parameter)


def eager_on_cpu(x: Tensor) -> bool:
    """Whether x is a plain tensor on CPU that is computed with now: not traced, not differentiated, and no mode looks
    on, such as a selective checkpoint's, which keeps results that must not be written again."""
    return (
        x.device.type == "cpu"
        and type(x) in PLAIN
        and not (torch.compiler.is_compiling() and compiling())
        and not (x.requires_grad and torch.is_grad_enabled())
        and forward_ad._current_level < 0  # no_grad does not end it
        and torch._C._get_tracing_state() is None  # torch.jit.trace would take the result for a constant
        and _get_current_dispatch_mode() is None
    )
