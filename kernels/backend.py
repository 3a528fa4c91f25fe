"""What runs here: the C++ of an operation, its definition, or in a graph the operation itself; and why.

`choose` is asked once in a call, of its first tensor. What it says of the machine is asked once per operation, dtypes
and setting, and kept; it never depends on what the process, or another one, did before. Whatever runs has the same
bits, for the operations whose result has one value; products and attention add up in another order.

The setting is one of the process: `set_backend`, `using_backend`, or the environment variable TE_MODELS_BACKEND.
"auto" takes the C++ wherever it can be had, compiled at its first use and kept for all later processes; "definition"
takes no C++ and no Triton of ours; "compiled" is an error where a library that is for this processor is missing.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from te_models.suggestions import shown

from . import cpp_library
from .compiling import compiling
from .torch_versions import constant_when_traced, exporting

Setting = Literal["auto", "definition", "compiled"]
VARIABLE = "TE_MODELS_BACKEND"
PLAIN = (Tensor, torch.nn.Parameter)


class BackendError(ValueError):
    """There is no such setting, or the setting asks for C++ that cannot be had here; the message says why."""


class Backend(enum.Enum):
    """DEFINITION: plain torch. COMPILED: a C++ library, called now. OPERATION: a registered operation in a graph, which
    asks again where it runs. TRITON: a kernel of ours on an accelerator. NATIVE: torch's own kernel."""

    DEFINITION = "definition"
    COMPILED = "compiled"
    OPERATION = "operation"
    TRITON = "triton"
    NATIVE = "native"


_BY_NAME: dict[str, Compiled] = {}


class Compiled:
    """The C++ of an operation, or of several with one library.

    load: called with a key, a dtype or several, loads the library for it, or raises CompilationError. dtypes: what keys
    may consist of. against: says why no machine like this has the library, or "". in_graphs: "always" where a graph
    holds the operation whether there is a library or not, "if there" where it does only then, "never". gradients:
    whether the C++ has a derivative.
    """

    def __init__(
        self,
        name: str,
        load: Callable[..., object],
        dtypes: tuple[object, ...],
        *,
        against: Callable[[], str] = str,
        in_graphs: Literal["always", "if there", "never"] = "never",
        gradients: bool = False,
    ) -> None:
        self.name, self.load, self.dtypes, self.against = name, load, dtypes, against
        self.in_graphs, self.gradients = in_graphs, gradients
        _BY_NAME[name] = self


class Answer(NamedTuple):
    """What runs, why nothing faster does, and whether that is for want of a library, which `fallbacks` counts."""

    backend: Backend
    reason: str = ""
    missing: bool = False


fallbacks: Counter[str] = Counter()
"""Why the definitions ran in place of a library -> how many operations they computed."""
_setting: Setting | None = None  # None: the environment's, read where it is first asked for
_kept: dict[tuple[Compiled, tuple[object, ...], Setting | None], Answer] = {}


def backend() -> Setting:
    """Return the setting of this process. Raises BackendError for a value of TE_MODELS_BACKEND that is not allowed."""
    if _setting is None:
        set_backend(cast(Setting, os.environ.get(VARIABLE) or "auto"), f"{VARIABLE} is")
    return cast(Setting, _setting)


def set_backend(setting: Setting, _what: str = "the backend is") -> None:
    """Let "auto", "definition" or "compiled" decide from now on in this process, in all threads.

    A graph goes on with what it was traced with. Raises BackendError for anything else.
    """
    global _setting
    if setting not in get_args(Setting):
        raise BackendError(f"{_what} {shown(setting)}; allowed: {', '.join(get_args(Setting))}")
    _setting = setting


@contextlib.contextmanager
def using_backend(setting: Setting) -> Iterator[None]:
    """Inside, `set_backend(setting)` holds, in all threads."""
    global _setting
    before = _setting
    set_backend(setting)
    try:
        yield
    finally:
        _setting = before


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
        answer = _kept.get((op, key, _setting)) or _ask(op, key)
        if answer.missing:
            fallbacks[answer.reason] += 1
        return answer.backend
    return Backend.DEFINITION


def has_library(op: Compiled, *key: object) -> bool:
    """Whether there is a library for a key, of tensors that are known to be fit for one: in an operation of a graph."""
    answer = _kept.get((op, key, _setting)) or _ask(op, key)
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
    return f"{op.name} runs as definition; not compiled: {asked or _ask(op, key).reason}"


def forget() -> None:
    """Ask the machine again, as a new process does."""
    _kept.clear()


def _ask(op: Compiled, key: tuple[object, ...]) -> Answer:
    """Return what runs of plain tensors in eager code, and keep it."""
    setting = backend()
    answer = _answer(op, key, setting)
    if answer.missing and setting == "compiled":
        raise BackendError(f"the backend is 'compiled', and {op.name} has no library here: {answer.reason}")
    _kept[op, key, setting] = answer
    return answer


def _answer(op: Compiled, key: tuple[object, ...], setting: Setting) -> Answer:
    if setting == "definition":
        return Answer(Backend.DEFINITION, "the backend is 'definition'")
    other = [part for part in key if part not in op.dtypes]
    if other:
        return Answer(Backend.DEFINITION, f"it is for {', '.join(map(str, op.dtypes))}, not for {other[0]}")
    against = op.against()
    if against:
        return Answer(Backend.DEFINITION, against)
    try:
        op.load(*key)
    except cpp_library.CompilationError as error:
        # by "#error" a source says that it is not for this processor
        return Answer(Backend.DEFINITION, str(error), missing="#error" not in str(error))
    return Answer(Backend.COMPILED)


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
    return has_library(_BY_NAME[name], *key)


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
