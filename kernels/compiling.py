"""Whether the compiler is at work in this thread."""

from __future__ import annotations

import torch
from torch._guards import CompileContext, TracingContext


def compiling() -> bool:
    """Return whether what calls this is being traced for `torch.compile` or `torch.export`.

    `torch.compiler.is_compiling` also says so of eager code that runs while another thread compiles (torch 2.13): its
    flag is one of the process. Traced, this is a constant as that is.
    """
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or _in_this_thread()


def _in_this_thread() -> bool:
    return CompileContext.try_get() is not None or TracingContext.try_get() is not None
