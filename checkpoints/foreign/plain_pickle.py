"""Read what a pickle says as plain values, without unpickling: no class is imported and nothing is called.

A pickle is a program for a stack machine. This machine knows the few instructions that build numbers, texts, lists,
tuples, dictionaries and records. Where the program names a class or a function, that must be one of the names that the
caller knows, and what it would make is a `Record` of the name and its arguments. Anything else is an error.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ..io.errors import CheckpointError, quote

MOST_BYTES = 1 << 30
"""Of one pickle. Metadata of a checkpoint takes about 500 bytes for each box of each rank."""


@dataclass(eq=False)
class Record:
    """What a pickle would make by calling `kind`, such as "torch.Size", with these arguments. state: what it would then
    hand to it."""

    kind: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, of a record whose state is a dictionary of them."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class Global:
    """A class, a function or a value that a pickle names."""

    name: str


class _Mark:
    pass


_VALUES = ("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_OLD_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "BYTEARRAY8")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
_SKIPPED = ("PROTO", "FRAME", "STOP")


def read_plain(data: bytes, where: str, known: Collection[str], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return what a pickle says.

    Arguments:
        where: names the file in errors.
        known: names that it may contain, and beginnings of names, ending in ".".
        persistent: makes a value of a reference to something outside of the pickle; None: there must be none.

    Raises CheckpointError, one sentence, for anything that is no such pickle.
    """
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{where} has {len(data)} bytes; allowed for a pickle: {MOST_BYTES}")
    try:
        return _Machine(where, known, persistent).run(data)
    except CheckpointError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where} is no pickle that holds plain values: {str(error)[:100]}") from None


class _Machine:
    def __init__(self, where: str, known: Collection[str], persistent: Callable[[Any], Any] | None) -> None:
        self.where, self.known, self.persistent = where, known, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._prefixes = tuple(name for name in known if name.endswith("."))

    def run(self, data: bytes) -> Any:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                if position is None or position + 1 != len(data):
                    raise ValueError("it goes on after its end")
                break
            self.do(opcode.name, argument)
        (value,) = self.stack
        if isinstance(value, _Mark):
            raise ValueError("it ends with a mark")
        return value

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES or name in _TEXTS or name in _OLD_TEXTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_Mark())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self.push(tuple(self.pop(int(name[-1]))))
        elif name in ("TUPLE", "LIST"):
            items = self.marked()
            self.push(tuple(items) if name == "TUPLE" else items)
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = self.pop(1) if name == "APPEND" else self.marked()
            self.of_kind(list).extend(items)
        elif name in ("SETITEM", "SETITEMS", "DICT"):
            items = self.pop(2) if name == "SETITEM" else self.marked()
            if name == "DICT":
                self.push({})
            target = stack[-1].items if isinstance(stack[-1], Record) else self.of_kind(dict)
            target.update(zip(items[::2], items[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = argument.split(" ", 1) if name == "GLOBAL" else self.pop(2)
            self.push(self.named(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            kind, arguments = self.pop(2)
            if not isinstance(kind, Global) or not isinstance(arguments, tuple):
                raise ValueError("it calls something that is no name")
            self.push(called(kind.name, arguments))
        elif name == "BUILD":
            (state,) = self.pop(1)
            if not isinstance(self.stack[-1], dict):  # of a dictionary, attributes say nothing
                self.of_kind(Record).state = state
        elif name == "BINPERSID" and self.persistent is not None:
            self.push(self.persistent(*self.pop(1)))
        elif name not in _SKIPPED:
            raise ValueError(f"it has the instruction {name}")

    def named(self, name: str) -> Any:
        if name not in self.known and not name.startswith(self._prefixes or ("\0",)):
            raise CheckpointError(
                f"{self.where} names {quote(name[:200])}, which no file of this kind does; nothing of it was run"
            )
        return Global(name)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("it takes more than there is")
        found = self.stack[-count:]
        del self.stack[-count:]
        if any(isinstance(value, _Mark) for value in found):
            raise ValueError("it takes a mark for a value")
        return found

    def marked(self) -> list[Any]:
        """Return what lies above the last mark, and remove both."""
        at = next(i for i in range(len(self.stack) - 1, -2, -1) if i < 0 or isinstance(self.stack[i], _Mark))
        if at < 0:
            raise ValueError("it has no mark")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def of_kind(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"it changes something that is no {kind.__name__}")
        return self.stack[-1]


def called(kind: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a call stands for: a plain value where Python's own containers are made, else a record."""
    if kind == "torch.Size" and len(arguments) == 1:
        return tuple(arguments[0])
    if kind in ("collections.OrderedDict", "builtins.dict") and not arguments:
        return {}
    return Record(kind, arguments)
