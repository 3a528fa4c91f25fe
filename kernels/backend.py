"""What runs here: the C++ of an operation, its definition, or in a graph the operation itself; and why.

`choose` is asked once in a call, of its first tensor. What it says of the machine is asked once per operation, dtypes
and setting, and kept; it never depends on what the process, or another one, did before. Whatever runs has the same
bits, for the operations whose result has one value; products and attention add up in another order.

The setting is one of the process: `set_backend`, `using_backend`, or the environment variable TE_MODELS_BACKEND.
"auto" takes the C++ wherever it can be had, compiled at its first use and kept for all later processes; "definition"
takes no C++ and no Triton of ours; "compiled" is an error where a library that is for this processor is missing.
"""

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import libraries
from .compiling import compiling
from .libraries import (
    Answer,
    Backend,
    BackendError,
    Compiled,
    backend,
    fallbacks,
    forget,
    has_library,
    set_backend,
    using_backend,
)
from .torch_versions import constant_when_traced, exporting

__all__ = [
    "PLAIN",
    "Answer",
    "Backend",
    "BackendError",
    "Compiled",
    "backend",
    "choose",
    "definitions_only",
    "explain",
    "fallbacks",
    "forget",
    "has_library",
    "runs_compiled",
    "set_backend",
    "using_backend",
]

PLAIN = (Tensor, torch.nn.Parameter)


@constant_when_traced
def definitions_only() -> bool:
    """Whether the setting is "definition": no Triton kernel of ours runs on an accelerator then. A graph goes on with
    the answer that it was traced with."""
    return backend() == "definition"


def choose(op: Compiled, x: Tensor, *key: object) -> Backend:
    """Return what computes an operation of x now. key: what the library is loaded for; without one x's dtype."""
    key = key or (x.dtype,)
    if torch.compiler.is_compiling() and compiling():
        return Backend.OPERATION if _in_graph(op, x, key) else Backend.DEFINITION
    # as `eager_on_cpu`: a layer's forward pass asks this several times
    if (
        x.is_cpu
        and type(x) in PLAIN
        and x.layout is torch.strided
        and not x.is_neg()
        and not x._is_zerotensor()
        and not (x.requires_grad and not op.gradients and torch.is_grad_enabled())
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and x.numel()
    ):
        answer = libraries.answers.get((op, key, libraries.current)) or libraries.ask(op, key)
        if answer.missing:
            fallbacks[answer.reason] += 1
        return answer.backend
    if libraries.supposed and op.in_graphs == "always" and _in_graph(op, x, key):
        return Backend.OPERATION
    return Backend.DEFINITION


def runs_compiled(op: Compiled, *key: object) -> bool:
    """Whether `choose` answers COMPILED for plain tensors that need no gradient, such as a description (`takes`) has
    found: for functions that compare their arguments by themselves."""
    if (
        peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or (torch.compiler.is_compiling() and compiling())
    ):
        return False
    answer = libraries.answers.get((op, key, libraries.current)) or libraries.ask(op, key)
    if answer.missing:
        fallbacks[answer.reason] += 1
    return answer.backend is Backend.COMPILED


def explain(op: Compiled, x: Tensor, *key: object) -> str:
    """Say in a sentence what `choose` answers, and why nothing faster runs."""
    key = key or (x.dtype,)
    found = choose(op, x, *key)
    if found is not Backend.DEFINITION:
        return f"{op.name} runs as {found.value}"
    traced = torch.compiler.is_compiling() and compiling()
    asked = (_against_tracing if traced else _against_tensor)(op, x, key)
    return f"{op.name} runs as definition; not compiled: {asked or libraries.ask(op, key).reason}"


def _in_graph(op: Compiled, x: Tensor, key: tuple[object, ...]) -> bool:
    """Whether a graph that is being traced holds the operation. What a library would be loaded for is asked of it where
    it runs: the graph is the same under every setting."""
    if op.in_graphs == "never" or exporting() or x.device.type != "cpu":
        return False
    if x.requires_grad and not op.gradients and torch.is_grad_enabled():
        return False
    return key[0] in op.dtypes if op.in_graphs == "always" else _is_there(op.name, key)


@constant_when_traced  # of constants, which an object of ours is not
def _is_there(name: str, key: tuple[object, ...]) -> bool:
    return has_library(libraries.BY_NAME[name], *key)


def _against_tracing(op: Compiled, x: Tensor, key: tuple[object, ...]) -> str:
    if op.in_graphs == "never":
        return "it is for eager code, and this is traced"
    if exporting():
        return "an exported program has no operations of ours"
    return _against_tensor(op, x, key)


def _against_tensor(op: Compiled, x: Tensor, key: tuple[object, ...]) -> str:
    """Return why no library computes with x now, whatever the machine has, or ""."""
    if x.device.type != "cpu":
        return f"it is for a CPU, this is {x.device.type}"
    if x.requires_grad and not op.gradients and torch.is_grad_enabled():
        return "a gradient is wanted, and the C++ has none"
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_neg() or x._is_zerotensor():
        return "it is for plain tensors"
    if not x.numel():
        return "there is nothing to compute"
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "a transform of torch.func, or forward mode, looks on"
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return "torch.jit.trace, or a mode, looks on"
    return ""
