"""Whether the compiler is at work in this thread, or anything else looks on what runs."""

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._guards import CompileContext, TracingContext
from torch.autograd import forward_ad


def compiling() -> bool:
    """Return whether what calls this is being traced for `torch.compile` or `torch.export`.

    `torch.compiler.is_compiling` also says so of eager code that runs while another thread compiles (torch 2.13): its
    flag is one of the process. Traced, this is a constant as that is.
    """
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or _in_this_thread()


def unobserved() -> bool:
    """Return whether nothing looks on what runs: neither the compiler nor torch.jit.trace, which would take a result
    for a constant, no transform of torch.func, no derivative in forward mode, which no_grad does not end, and no mode,
    such as a selective checkpoint's, which keeps results that must not be written again."""
    return (
        not (torch.compiler.is_compiling() and compiling())
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _in_this_thread() -> bool:
    return CompileContext.try_get() is not None or TracingContext.try_get() is not None
