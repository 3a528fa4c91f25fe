"""Which computations run on CPU as they are written, operation by operation.

torch's eager operations on CPU are as fast as the memory that they read and write, but for some that take an element at
a time: comparisons, choices, reductions over short rows, some casts. Where that matters there is a form without them,
with the same bits; the compiler vectorises the definition itself.
"""

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ..backend import PLAIN as PLAIN
from ..compiling import compiling


def plain_on_cpu(x: Tensor) -> bool:
    """Whether x is a plain tensor with values in a CPU's memory that needs no gradient."""
    return (
        x.is_cpu
        and type(x) in PLAIN
        and x.layout is torch.strided
        and not x.is_neg()
        and not x._is_zerotensor()
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def eager_on_cpu(x: Tensor) -> bool:
    """Whether x is a plain tensor on CPU that is computed with now, unobserved: not traced, not differentiated.

    `plain_on_cpu(x) and unobserved()` in one call: an eager forward pass asks this a dozen times.
    """
    return (
        x.is_cpu
        and type(x) in PLAIN
        and not (torch.compiler.is_compiling() and compiling())
        and x.layout is torch.strided
        and not x.is_neg()
        and not x._is_zerotensor()
        and not (x.requires_grad and torch.is_grad_enabled())
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )
