"""Calls of an implementation past the dispatcher, where nobody could tell.

A call of a registered operation takes 60 to 200 us of Python on CPU, which is the time of a GEMM of one token. Calls
with tensors of a GPU keep their dispatcher, which makes that one current.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._library.custom_ops import CustomOpDef

from ..compiling import compiling


def direct(op: CustomOpDef) -> Callable[..., Any]:
    """Return an operation as a function of the schema's arguments. Where gradients are off, nothing compiles, all
    tensors are on the CPU, and no mode or subclass would see it, the implementation is called: the same results."""
    implementation = op._init_fn

    def call(*args: Any) -> Any:
        return implementation(*args) if _unseen(args) else op(*args)

    return call


def _unseen(args: tuple[Any, ...]) -> bool:
    return (
        not compiling()
        and not torch.is_grad_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
        and all(type(a) in (Tensor, nn.Parameter) and a.device.type == "cpu" for a in args if isinstance(a, Tensor))
    )
