"""Which C++ libraries there are here, under the setting; the machine is asked once. Without torch, so that verbs that
move bytes need not import it. `backend` says which of them compute a tensor.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, cast, get_args

from te_models.suggestions import shown

from . import cpp_library

Setting = Literal["auto", "definition", "compiled"]
VARIABLE = "TE_MODELS_BACKEND"


class BackendError(ValueError):
    """There is no such setting, or the setting asks for C++ that cannot be had here; the message says why."""


class Backend(enum.Enum):
    """DEFINITION: plain torch. COMPILED: a C++ library, called now. OPERATION: a registered operation in a graph; it
    asks again where it runs. TRITON: a kernel of ours on an accelerator. NATIVE: torch's own kernel."""

    DEFINITION = "definition"
    COMPILED = "compiled"
    OPERATION = "operation"
    TRITON = "triton"
    NATIVE = "native"


BY_NAME: dict[str, Compiled] = {}
"""All of them."""


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
        BY_NAME[name] = self


class Answer(NamedTuple):
    """What runs, why nothing faster does, and whether that is for want of a library (`fallbacks` counts those)."""

    backend: Backend
    reason: str = ""
    missing: bool = False


fallbacks: Counter[str] = Counter()
"""Why the definitions ran in place of a library -> how many operations they computed."""
current: Setting | None = None
"""The setting; None: the environment's, read where it is first asked for."""
supposed = False
"""Whether tensors have no values, and operations of ours are called as what they are, one for one: for a plan, to which
each operation of a definition would be time, and memory that no library takes."""
answers: dict[tuple[Compiled, tuple[object, ...], Setting | None], Answer] = {}
"""Library, key and setting -> what was answered."""


def backend() -> Setting:
    """Return the setting of this process. Raises BackendError for a value of TE_MODELS_BACKEND that is not allowed."""
    if current is None:
        set_backend(cast(Setting, os.environ.get(VARIABLE) or "auto"), f"{VARIABLE} is")
    return cast(Setting, current)


def set_backend(setting: Setting, _what: str = "the backend is") -> None:
    """Let "auto", "definition" or "compiled" decide from now on in this process, in all threads.

    A graph goes on with what it was traced with. Raises BackendError for anything else.
    """
    global current
    if setting not in get_args(Setting):
        raise BackendError(f"{_what} {shown(setting)}; allowed: {', '.join(get_args(Setting))}")
    current = setting


@contextlib.contextmanager
def using_backend(setting: Setting) -> Iterator[None]:
    """Inside, `set_backend(setting)` holds, in all threads."""
    global current
    before = current
    set_backend(setting)
    try:
        yield
    finally:
        current = before


def has_library(op: Compiled, *key: object) -> bool:
    """Whether there is a library for a key, of tensors that are known to be fit for one: in an operation of a graph."""
    answer = answers.get((op, key, current)) or ask(op, key)
    if answer.missing:
        fallbacks[answer.reason] += 1
    return answer.backend is Backend.COMPILED


def forget() -> None:
    """Ask the machine again, as a new process does."""
    answers.clear()


def ask(op: Compiled, key: tuple[object, ...]) -> Answer:
    """Return what runs of plain tensors in eager code, and keep it."""
    setting = backend()
    answer = _answer(op, key, setting)
    if answer.missing and setting == "compiled":
        raise BackendError(f"the backend is 'compiled', and {op.name} has no library here: {answer.reason}")
    answers[op, key, setting] = answer
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
