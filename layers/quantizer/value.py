"""Value objects for the compiler: classes whose instances are constants that a graph is guarded on and rebuilt from.

A value class is a frozen dataclass of plain fields. Its equality and hash come from the fields; `__fx_repr__` writes an
instance into the generated code as the class itself plus its fields. Where torch has no such constants (2.11), it
traces what is made of them: see `register_constants`.
"""

import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from te_models.kernels.torch_versions import register_constants

T = TypeVar("T")
C = TypeVar("C", bound="type[ValueObject]")

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def dtype_of_enum(dtype: Any) -> Any:
    """Return a dtype as torch's, also where it is a name of an enum for one."""
    return dtype.value if isinstance(dtype, enum.Enum) else dtype


class derived(Generic[T]):
    """A read-only property of a value object, computed from its fields.

    Instances of a `value_class` have it as a plain attribute, computed once, when they are made: all of them alike,
    because the compiler guards on which attributes an object has. Elsewhere it is computed where it is read. The
    compiler traces a descriptor written in Python on such an object, but not the built-in `property` (torch 2.13).
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        return self._function(instance)


def _derived_names(cls: type) -> tuple[str, ...]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        found |= vars(base)
    return tuple(name for name, member in found.items() if isinstance(member, derived))


_DERIVED: dict[tuple[Any, ...], dict[str, Any]] = {}
"""(class, values of the fields) -> derived properties: each step may build its recipe again, of the same values."""
_MOST_DERIVED = 1024


def _derive(instance: Any) -> None:
    """Compute the derived properties of an instance that has its fields, or take an equal one's."""
    key = (type(instance), *vars(instance).values())
    found = _DERIVED.get(key)
    if found is None:
        found = {name: getattr(instance, name) for name in instance._derived_names}
        if len(_DERIVED) >= _MOST_DERIVED:
            _DERIVED.clear()
        _DERIVED[key] = found
    vars(instance).update(found)


class ValueObject:
    """Base of value classes; a leaf is decorated with `value_class`."""

    _derived_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._derived_names = _derived_names(cls)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Return an expression for an equal object, and the globals it needs: classes themselves, not their names.

        TypeError where an attribute is not a plain value, such as a process group or a tensor: live state does not
        belong in a graph; pass it per call.
        """
        names = {"_rebuild_value": rebuild_value, "torch": torch}
        return _expression(self, names), names


def rebuild_value(cls: type, **fields: Any) -> Any:
    """Return an instance of a value class without running `__init__`, whose checks the original has passed."""
    self = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(self, name, value)
    if register_constants is not None:
        _derive(self)
    return self


def _expression(value: Any, names: dict[str, Any]) -> str:
    """Return an expression for a plain value or value object; add what it refers to to `names`."""
    if isinstance(value, ValueObject):
        declared = {f.name for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        own = {name: held for name, held in vars(value).items() if name not in value._derived_names}
        for name, held in own.items():
            if name not in declared or not _is_plain(held):
                raise TypeError(
                    f"{type(value).__name__}.{name} is a {type(held).__name__}, live state that a graph cannot hold; "
                    "a value object has declared fields of plain values only, pass the rest per call"
                )
        fields = "".join(f", {name}={_expression(held, names)}" for name, held in own.items())
        return f"_rebuild_value({_class_name(type(value), names)}{fields})"
    if isinstance(value, enum.Enum):
        return f"{_class_name(type(value), names)}[{value.name!r}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _class_name(cls: type, names: dict[str, Any]) -> str:
    """Return a global name for `cls`: the same in every process for an importable class, distinct for any two."""
    name = re.sub(r"\W", "_", f"{cls.__module__}_{cls.__qualname__}")
    if "<locals>" in cls.__qualname__:
        name += f"_{id(cls)}"
    names[name] = cls
    return name


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, enum.Enum, ValueObject))


def _check_hint(cls: type, name: str, hint: Any) -> None:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            _check_hint(cls, name, member)
    elif typing.get_origin(hint) is typing.Literal:
        return
    elif not (isinstance(hint, type) and issubclass(hint, (*_PLAIN, enum.Enum, ValueObject))):
        raise TypeError(
            f"{cls.__name__}.{name} is annotated {hint}; a value class holds bool, int, float, str, None, torch.dtype, "
            "enums and value objects only"
        )


def value_class(cls: C) -> C:
    """Check a frozen dataclass's fields and register it with the compiler. TypeError for a field that is no value."""
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or "__dataclass_params__" not in vars(cls):
        raise TypeError(f"{cls.__name__} is not a frozen dataclass")
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        _check_hint(cls, field.name, hints[field.name])
    _derive_at_the_end_of_init(cls)
    _register(cls)
    return cls


def _derive_at_the_end_of_init(cls: type) -> None:
    if (
        register_constants is None
    ):  # it traces quantizers that are made in a graph, and guards on every attribute that it reads
        return
    own_init = cls.__init__  # type: ignore[misc]

    @functools.wraps(own_init)
    def init(self: Any, *args: Any, **fields: Any) -> None:
        own_init(self, *args, **fields)
        _derive(self)

    cls.__init__ = init  # type: ignore[misc]


def _register(cls: type) -> None:
    """Register with the compiler, where this torch has something to register with."""
    if register_constants is not None:
        register_constants(cls)


@value_class
@dataclasses.dataclass(frozen=True, init=False)
class WithUsages(ValueObject):
    """A quantizer that makes other copies. The compiler does not trace how one is made, but it makes value objects of
    constants, and this one makes a quantizer."""

    value: ValueObject

    def __init__(self, quantizer: Any, rowwise: bool, columnwise: bool) -> None:
        other = dataclasses.replace(quantizer, rowwise=rowwise, columnwise=columnwise)
        object.__setattr__(self, "value", other)
