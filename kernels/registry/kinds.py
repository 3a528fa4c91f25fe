"""Values that are several arguments of a schema: NamedTuples, frozen dataclasses, and what other folders add.

A folder above this one makes a type known by giving `add_kind` a function from an annotation to its `Kind` (or, where
one argument will do, to how it is `Encoded`), or None where the annotation is not its business. An annotation that
nobody knows is refused when an operation is registered.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """How values of one annotation become parts, each with an annotation of its own, and values again.

    parts: name -> annotation; the part named "" keeps the name of the parameter. take: of a value, its parts in that
    order; make: undoes it. mutated: the parts that every operation which takes such a value writes to. prefixed: parts
    are named `<parameter>_<part>`; else by the part alone, unless two parameters are of this kind or one has its name.
    """

    parts: Mapping[str, Any]
    take: Callable[[Any], Sequence[Any]]
    make: Callable[[Sequence[Any]], Any]
    mutated: tuple[str, ...] = ()
    prefixed: bool = True


class Encoded(NamedTuple):
    """How values of one annotation become one argument of a schema, of a type that it knows, and values again."""

    annotation: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


Finder = Callable[[Any], Kind | Encoded | None]
_FINDERS: list[Finder] = []


def add_kind(find: Finder) -> Finder:
    """Make types known: find(annotation) says how they become arguments, None for what is another's business.

    The one added last is asked first, so that a class that happens to be a frozen dataclass is more than its fields.
    """
    _FINDERS.append(find)
    return find


def kind_of(hint: Any) -> Kind | Encoded | None:
    """Return what is known of an annotation; None where it is nothing. TypeError for a class that may change."""
    for find in reversed(_FINDERS):
        kind = find(hint)
        if kind is not None:
            return kind
    return None


@add_kind
def _object(hint: Any) -> Kind | None:
    """A NamedTuple or frozen dataclass: its fields."""
    if not isinstance(hint, type):
        return None
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        names: Sequence[str] = hint._fields  # type: ignore[attr-defined]
    elif dataclasses.is_dataclass(hint):
        if not hint.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise TypeError(f"{hint.__name__} is a dataclass that may change; an operation takes frozen ones")
        names = [f.name for f in dataclasses.fields(hint)]
    else:
        return None
    hints = typing.get_type_hints(hint)

    def take(value: Any) -> list[Any]:
        if type(value) is not hint:  # of a subclass fields would be lost
            raise TypeError(f"a {type(value).__name__} was passed where an operation takes a {hint.__name__}")
        return [getattr(value, name) for name in names]

    def make(parts: Sequence[Any]) -> Any:
        return hint(**dict(zip(names, parts, strict=True)))

    return Kind({name: hints[name] for name in names}, take, make, prefixed=False)
