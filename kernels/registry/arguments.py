"""Parameters of registered operations, laid out flat as their schema takes them.

A NamedTuple or a frozen dataclass (a quantized operand, a group of options, a value quantizer, one inside the other)
becomes its fields one by one, tensors first. They keep their names; where an operation takes two objects of a class
they are `<parameter>_<field>`. Everything else is one argument (see `slots`).
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .slots import Slot, slot_of

_SLOTS: dict[type, tuple[Slot, ...]] = {}
"""How the fields of each argument object that an operation takes are laid out."""


class Plan(NamedTuple):
    """How an object is made of flat values: per field the place of its value, or the plan of an object inside."""

    cls: type
    fields: tuple[tuple[str, int | Plan], ...]

    def build(self, flat: Sequence[Any]) -> Any:
        """Return the object."""
        return self.cls(**{n: flat[at] if isinstance(at, int) else at.build(flat) for n, at in self.fields})


class Parameter(NamedTuple):
    """One parameter of an implementation: its slots, and the plan of the object that they are fields of, if any."""

    name: str
    slots: tuple[Slot, ...]
    plan: Plan | None
    default: Any

    def value(self, flat: Sequence[Any]) -> Any:
        """Return the parameter's value, of those of its slots."""
        decoded = [v if s.decode is None else s.decode(v) for s, v in zip(self.slots, flat, strict=True)]
        return decoded[0] if self.plan is None else self.plan.build(decoded)

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
    objects = [hints.get(name) for name in signature]
    owner = function.__name__
    found: list[Parameter] = []
    for name, parameter in signature.items():
        if name not in hints or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{owner}.{name}: a parameter of an operation is positional, and annotated")
        hint = hints[name]
        if not _is_object(hint):
            found.append(Parameter(name, (slot_of(hint, name, owner),), None, parameter.default))
            continue
        if parameter.default is not parameter.empty:
            raise TypeError(f"{owner}.{name}: an object has no default in a schema")
        _SLOTS[hint] = _slots(hint)
        prefix = f"{name}_" if objects.count(hint) > 1 else ""
        slots = tuple(slot._replace(name=prefix + slot.name) for slot in _SLOTS[hint])
        found.append(Parameter(name, slots, _plan(hint, [slot.path for slot in slots]), parameter.default))
    names = [slot.name for parameter in found for slot in parameter.slots]
    if len(set(names)) < len(names):
        raise TypeError(f"{owner}: two arguments of the schema have one name: {', '.join(names)}")
    return tuple(found)


def flatten(value: Any) -> list[Any]:
    """Return an argument object's fields as a schema takes them. KeyError for a class that no operation takes."""
    flat: list[Any] = []
    for slot in _SLOTS[type(value)]:
        held = value
        for name in slot.path:
            held = getattr(held, name)
        flat.append(held if slot.encode is None else slot.encode(held))
    return flat


def _is_object(hint: Any) -> bool:
    if not isinstance(hint, type):
        return False
    if dataclasses.is_dataclass(hint):
        if not hint.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise TypeError(f"{hint.__name__} is a dataclass that may change; an operation takes frozen ones")
        return True
    return issubclass(hint, tuple) and hasattr(hint, "_fields")


def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    names = cls._fields if issubclass(cls, tuple) else [f.name for f in dataclasses.fields(cls)]  # type: ignore[attr-defined]
    return {name: hints[name] for name in names}


def _slots(cls: type) -> tuple[Slot, ...]:
    found: list[Slot] = []
    for name, hint in _fields(cls).items():
        inner = _slots(hint) if _is_object(hint) else (slot_of(hint, name, cls.__name__),)
        for slot in inner:
            found.append(slot._replace(name=f"{name}_{slot.name}" if slot.path else name, path=(name, *slot.path)))
    return tuple(sorted(found, key=lambda slot: not slot.holds_tensor))


def _plan(cls: type, paths: list[tuple[str, ...]], inside: tuple[str, ...] = ()) -> Plan:
    found: list[tuple[str, int | Plan]] = []
    for name, hint in _fields(cls).items():
        path = (*inside, name)
        found.append((name, paths.index(path) if path in paths else _plan(hint, paths, path)))
    return Plan(cls, tuple(found))
