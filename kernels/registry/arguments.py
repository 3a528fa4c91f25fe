"""Parameters of registered operations, laid out flat as their schema takes them.

A value of a kind (see `kinds`: a quantized operand, a group of options, one inside the other) becomes its parts one by
one, tensors first. Everything else is one argument (see `slots`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .kinds import Encoded, Kind, kind_of
from .slots import Slot, slot_of


class Branch(NamedTuple):
    """A value of several arguments: its kind, and how each of its parts is laid out."""

    kind: Kind
    parts: tuple[Slot | Branch, ...]


Layout = Slot | Branch
_OBJECTS: dict[type, Parameter] = {}
"""How each class of argument objects that an operation takes is laid out."""


class Parameter(NamedTuple):
    """One parameter of an implementation. slots: its arguments as the schema has them; order: of these, the position
    in the layout, which goes through the value part by part.

    The leaves of a value are its smallest parts in that order, not encoded yet.
    """

    name: str
    slots: tuple[Slot, ...]
    layout: Layout
    order: tuple[int, ...]
    default: Any

    def leaves(self, value: Any) -> list[Any]:
        """Return the leaves of a value."""
        found: list[Any] = []
        _append(self.layout, value, found)
        return found

    def of_leaves(self, leaves: Sequence[Any]) -> Any:
        """Return the value of its leaves."""
        return _made(self.layout, leaves, 0)[0]

    def encoded(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the schema's arguments for these leaves."""
        slots = zip(self.slots, self.order, strict=True)
        return [leaves[at] if slot.encode is None else slot.encode(leaves[at]) for slot, at in slots]

    def flat(self, value: Any) -> list[Any]:
        """Return the schema's arguments for a value."""
        return self.encoded(self.leaves(value))

    def value(self, flat: Sequence[Any]) -> Any:
        """Return the value, of the schema's arguments."""
        leaves: list[Any] = [None] * len(flat)
        for slot, at, given in zip(self.slots, self.order, flat, strict=True):
            leaves[at] = given if slot.decode is None else slot.decode(given)
        return self.of_leaves(leaves)

    @property
    def flat_default(self) -> Any:
        """The default in the schema."""
        encode = self.slots[0].encode
        return self.default if self.default is inspect.Parameter.empty or encode is None else encode(self.default)


def values_of(parameters: Sequence[Parameter], flat: Sequence[Any]) -> dict[str, Any]:
    """Return each parameter's value, of the schema's arguments; those at their default may be missing at the end."""
    found: dict[str, Any] = {}
    start = 0
    for parameter in parameters:
        own = flat[start : start + len(parameter.slots)]
        start += len(parameter.slots)
        found[parameter.name] = parameter.value(own) if own else parameter.default
    return found


def parameters_of(function: Callable) -> tuple[Parameter, ...]:
    """Lay out a function's parameters. TypeError for an annotation that no schema can hold, or a repeated name."""
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function).parameters
    annotations = [hints.get(name) for name in signature]
    owner = function.__name__
    found: list[Parameter] = []
    for name, parameter in signature.items():
        if name not in hints or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{owner}.{name}: a parameter of an operation is positional, and annotated")
        hint = hints[name]
        layout = _layout(hint, name, owner)
        if isinstance(layout, Slot):
            found.append(Parameter(name, (layout,), layout, (0,), parameter.default))
            continue
        if parameter.default is not parameter.empty:
            raise TypeError(f"{owner}.{name}: an object has no default in a schema")
        prefixed = (
            layout.kind.prefixed or annotations.count(hint) > 1 or not signature.keys().isdisjoint(layout.kind.parts)
        )
        slots = list(_slots(layout, name if prefixed else ""))
        order = tuple(sorted(range(len(slots)), key=lambda i: not slots[i].holds_tensor))
        found.append(Parameter(name, tuple(slots[i] for i in order), layout, order, parameter.default))
        if isinstance(hint, type):
            _OBJECTS[hint] = found[-1]
    names = [slot.name for parameter in found for slot in parameter.slots]
    if len(set(names)) < len(names):
        raise TypeError(f"{owner}: two arguments of the schema have one name: {', '.join(names)}")
    return tuple(found)


def flatten(value: Any) -> list[Any]:
    """Return an argument object's fields as a schema takes them. KeyError for a class that no operation takes."""
    return _OBJECTS[type(value)].flat(value)


def _layout(hint: Any, name: str, owner: str) -> Layout:
    kind = kind_of(hint)
    if kind is None:
        return slot_of(hint, name, owner)
    if isinstance(kind, Encoded):
        return Slot(name, *kind)
    inside = hint.__name__ if isinstance(hint, type) else f"{owner}.{name}"
    return Branch(kind, tuple(_layout(part, own, inside) for own, part in kind.parts.items()))


def _slots(layout: Branch, name: str) -> Iterator[Slot]:
    """Yield the slots of a layout part by part, under the names they have in the schema."""
    for own, part in zip(layout.kind.parts, layout.parts, strict=True):
        full = "_".join(filter(None, (name, own)))
        if isinstance(part, Slot):
            yield part._replace(name=full, mutated=own in layout.kind.mutated)
        else:
            yield from _slots(part, full)


def _append(layout: Layout, value: Any, leaves: list[Any]) -> None:
    if isinstance(layout, Slot):
        leaves.append(value)
    else:
        for part, held in zip(layout.parts, layout.kind.take(value), strict=True):
            _append(part, held, leaves)


def _made(layout: Layout, leaves: Sequence[Any], at: int) -> tuple[Any, int]:
    """Return the value whose leaves begin at a position, and where those of the next one begin."""
    if isinstance(layout, Slot):
        return leaves[at], at + 1
    parts = []
    for part in layout.parts:
        value, at = _made(part, leaves, at)
        parts.append(value)
    return layout.kind.make(parts), at
