"""Parameters of registered operations as their schema takes them: laid out flat, and back.

as it is             Tensor, bool, int, float, str, torch.dtype, each also `| None`; list[Tensor], list[int], list[bool]
as another type      tuple[int, ...] of any length, or None: list[int], empty for None; Literal of strings: str;
                     enum: its name; process group: its name, looked up where the operation runs
as several           NamedTuples, frozen dataclasses (a quantized operand, a group of options, one inside the other),
and
                     what other folders add: their parts one by one, tensors first

A folder above this one makes a type known by giving `add_kind` a function from an annotation to its `Kind` (or, where
one argument will do, to how it is `Encoded`), or None where the annotation is not its business. An annotation that
nobody knows is refused when an operation is registered.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_SCALARS: tuple[Any, ...] = (bool, int, float, str, torch.dtype, Tensor)
_AS_IT_IS = {*_SCALARS, *(t | None for t in _SCALARS), list[Tensor], list[int], list[bool]}


class Slot(NamedTuple):
    """One argument of a schema: its name, type, and how a value gets there and back; None: as it is.

    mutated: whether an operation that takes it writes to it, whatever it says itself.
    """

    name: str
    annotation: Any
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None
    mutated: bool = False

    @property
    def holds_tensor(self) -> bool:
        """Whether it is a tensor, a list of them, or None in place of one."""
        return self.annotation in (Tensor, Tensor | None, list[Tensor])


def slot_of(hint: Any, name: str, owner: str) -> Slot:
    """Return the slot of a value annotated `hint`. TypeError where no schema can hold it."""
    if hint in _AS_IT_IS:
        return Slot(name, hint)
    # `typing.Union` is what `Literal[...] | None` is
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    optional = type(None) in members
    rest = [m for m in members if m is not type(None)]
    if len(rest) == 1:
        (only,) = rest
        if typing.get_origin(only) is Literal and all(isinstance(value, str) for value in typing.get_args(only)):
            return Slot(name, str | None if optional else str)
        if typing.get_origin(only) is tuple and set(typing.get_args(only)) <= {int, Ellipsis}:
            return Slot(name, list[int], _list_of, _tuple_or_none if optional else tuple)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Slot(name, str, _name_of, hint.__getitem__)
    if torch.distributed.is_available() and hint is torch.distributed.ProcessGroup:
        return Slot(name, str, _group_name, _group)
    raise TypeError(
        f"{owner}.{name} is annotated {hint}; an operation takes tensors, numbers, strings, dtypes, enums, process "
        "groups, tuples of sizes, NamedTuples or frozen dataclasses of these, and types made known with `add_kind`"
    )


def _list_of(value: tuple[int, ...] | None) -> list[int]:
    return [] if value is None else list(value)


def _tuple_or_none(value: list[int]) -> tuple[int, ...] | None:
    return tuple(value) if value else None


def _name_of(value: enum.Enum) -> str:
    return value.name


def _group_name(group: torch.distributed.ProcessGroup) -> str:
    return group.group_name


def _group(name: str) -> torch.distributed.ProcessGroup:
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


class Kind(NamedTuple):
    """How values of one annotation become parts, each with an annotation, and values again.

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


def annotation_kind(hint: Any) -> Kind | Encoded | None:
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


class Branch(NamedTuple):
    """A value of several arguments: its kind, and how each of its parts is laid out."""

    kind: Kind
    parts: tuple[Slot | Branch, ...]


Layout = Slot | Branch
_OBJECTS: dict[type, SchemaParameter] = {}
"""How each class of argument objects that an operation takes is laid out."""


class SchemaParameter(NamedTuple):
    """One parameter of an implementation. slots: its arguments as the schema has them; order: of these, the position
    in the layout, which goes through the value part by part; by_keyword: whether it is passed by keyword only, whose
    default is the caller's to fill in: the schema has none.

    The leaves of a value are its smallest parts in that order, not encoded yet.
    """

    name: str
    slots: tuple[Slot, ...]
    layout: Layout
    order: tuple[int, ...]
    default: Any
    by_keyword: bool = False

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

    @property
    def flattener(self) -> Callable[[Any], Sequence[Any]] | None:
        """What gives the schema's arguments for a value, as `flat` does, with the least for a compiler to trace; None
        where the value is the argument."""
        if isinstance(self.layout, Slot):
            encode = self.layout.encode
            return None if encode is None else lambda value: (encode(value),)
        as_taken = self.order == tuple(range(len(self.layout.parts)))
        if as_taken and all(isinstance(part, Slot) and part.encode is None for part in self.layout.parts):
            return self.layout.kind.take
        return self.flat

    def value(self, flat: Sequence[Any]) -> Any:
        """Return the value, of the schema's arguments."""
        if isinstance(self.layout, Slot):
            return flat[0] if self.layout.decode is None else self.layout.decode(flat[0])
        leaves: list[Any] = [None] * len(flat)
        for slot, at, leaf in zip(self.slots, self.order, flat, strict=True):
            leaves[at] = leaf if slot.decode is None else slot.decode(leaf)
        return self.of_leaves(leaves)

    @property
    def flat_default(self) -> Any:
        """The default in the schema."""
        if self.by_keyword:
            return inspect.Parameter.empty
        encode = self.slots[0].encode
        return self.default if self.default is inspect.Parameter.empty or encode is None else encode(self.default)


def argument_values(parameters: Sequence[SchemaParameter], flat: Sequence[Any]) -> dict[str, Any]:
    """Return each parameter's value, of the schema's arguments; those at their default may be missing at the end."""
    found: dict[str, Any] = {}
    start = 0
    for parameter in parameters:
        own = flat[start : start + len(parameter.slots)]
        start += len(parameter.slots)
        if own and isinstance(parameter.layout, Slot) and parameter.layout.decode is None:
            found[parameter.name] = own[0]  # of most parameters: without a call
        else:
            found[parameter.name] = parameter.value(own) if own else parameter.default
    return found


def parameters_of(function: Callable) -> tuple[SchemaParameter, ...]:
    """Lay out a function's parameters. TypeError for an annotation that no schema can hold, or a repeated name."""
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function).parameters
    annotations = [hints.get(name) for name in signature]
    owner = function.__name__
    found: list[SchemaParameter] = []
    for name, parameter in signature.items():
        by_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if name not in hints or not (by_keyword or parameter.kind is parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{owner}.{name}: a parameter of an operation has a name, and an annotation")
        hint = hints[name]
        layout = _layout(hint, name, owner)
        if isinstance(layout, Slot):
            found.append(SchemaParameter(name, (layout,), layout, (0,), parameter.default, by_keyword))
            continue
        if parameter.default is not parameter.empty:
            raise TypeError(f"{owner}.{name}: an object has no default in a schema")
        prefixed = (
            layout.kind.prefixed or annotations.count(hint) > 1 or not signature.keys().isdisjoint(layout.kind.parts)
        )
        slots = list(_slots(layout, name if prefixed else ""))
        order = tuple(sorted(range(len(slots)), key=lambda i: not slots[i].holds_tensor))
        found.append(
            SchemaParameter(name, tuple(slots[i] for i in order), layout, order, parameter.default, by_keyword)
        )
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
    kind = annotation_kind(hint)
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
    """Return the value whose leaves begin at a position, and where the leaves of the next one begin."""
    if isinstance(layout, Slot):
        return leaves[at], at + 1
    parts = []
    for part in layout.parts:
        value, at = _made(part, leaves, at)
        parts.append(value)
    return layout.kind.make(parts), at
