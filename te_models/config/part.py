"""Values of a configuration: frozen, checked against their annotations when made, exact as dictionaries.

A field that is left at None may be filled in from others (a head dimension from the hidden size, a list of layers from
their number). Each part remembers which of its fields were: `replace` derives them again, and keeps what was given.
"""

import copy
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, Self


class ConfigError(ValueError):
    """A configuration field has a value that is not allowed; the message names the field, the value and the choice.

    where: the name of the field, with which the message begins; "" where it begins with something else.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


def check(condition: bool, where: str, value: object, allowed: str) -> None:
    """Raise ConfigError, naming the field `where`, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{where} is {value!r}; allowed: {allowed}", where)


@dataclass(frozen=True, kw_only=True)
class ConfigPart:
    """Base of all configuration parts: exact dictionary round trip, and type checks on construction."""

    _derived: ClassVar[frozenset[str]] = frozenset()
    """The fields that were left at None and filled in; instances with such fields have a separate set."""
    _LATER: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out of dictionaries while they have their default: a folder that does not use them has the
    bytes that it had before they existed."""
    __replace__: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        cls.__replace__ = cls.replace  # `copy.replace` of Python 3.13

    def __post_init__(self) -> None:
        for name, where, coerced in _coercions(type(self)):
            object.__setattr__(self, name, coerced(where, getattr(self, name)))
        self._validate()

    def _validate(self) -> None:
        """Check relations between fields and `_fill` those that are left at None; raise ConfigError."""

    def _derivations(self) -> dict[str, Any]:
        """Return what fields become that are left at None: of this part ("name") or of one inside it ("part.name")."""
        return {}

    def _fill(self, *, read: bool = False) -> None:
        """Give the fields of `_derivations` that are None, or were derived before, their values, and remember which.

        read: the fields come from a file with every field filled in: one with the derived value counts as such.
        """
        for path, value in self._derivations().items():
            outer, _, name = path.rpartition(".")
            part = getattr(self, outer) if outer else self
            present = getattr(part, name)
            if present is not None and name not in part._derived and not (read and present == value):
                continue
            if outer:  # a part may be in use elsewhere: this one is changed in a copy
                part = copy.copy(part)
                object.__setattr__(self, outer, part)
            object.__setattr__(part, name, value)
            object.__setattr__(part, "_derived", part._derived | {name})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: dict, list, str, int, float, bool, None."""
        values = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: _plain(v) for name, (v, default) in values.items() if name not in self._LATER or v != default}

    def tagged(self) -> dict[str, Any]:
        """Return `to_dict` of a part that stands among others by name, with what tells its kind."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_dict`. An unknown or missing field raises ConfigError by name.

        A dictionary does not say which values were derived from others. One that has the value that would be derived
        (a mixture in all layers, heads that share hidden_size) follows in `replace` what it derives from.
        """
        check(isinstance(values, dict), cls.__name__, values, "an object of named fields")
        _check_names(cls, values)
        for name, required in _field_names(cls).items():
            if required and name not in values:
                raise ConfigError(f"{cls.__name__} needs the field {name!r}")
        part = cls(**values)
        part._fill(read=True)
        return part

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the named fields changed: what the constructor returns for the fields that this part was
        given and these. Fields that were derived are derived again; ConfigError where given ones do not fit the change.
        """
        _check_names(type(self), changes)
        current = {f.name: None if f.name in self._derived else getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self)(**current | changes)


class NamedParts(dict[str, Any]):
    """Parts by name that nothing changes, as all values of a configuration."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedParts, (dict(self),)

    def _unchangeable(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a configuration's parts cannot be changed; allowed: `replace`, which returns another one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _unchangeable  # type: ignore


Coercion = Callable[[str, Any], Any]
"""Where a value is and the value -> it as the annotated type."""


@functools.cache
def _coercions(cls: type[ConfigPart]) -> tuple[tuple[str, str, Coercion], ...]:
    """Return the name of each field, how messages name it, and what its values become."""
    hints = typing.get_type_hints(cls)  # compiles each annotation again: longer than making a part
    return tuple((f.name, f"{cls.__name__}.{f.name}", _coercion(hints[f.name])) for f in dataclasses.fields(cls))


@functools.cache
def _field_names(cls: type[ConfigPart]) -> dict[str, bool]:
    """Return the names of the fields, and of each whether it has no default."""
    missing = dataclasses.MISSING
    return {f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(cls)}


def _check_names(cls: type[ConfigPart], values: Iterable[Any]) -> None:
    """Raise ConfigError naming the first of `values` that is no field."""
    known = _field_names(cls)
    for name in values:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}; its fields are: {', '.join(sorted(known))}")


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigPart):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, NamedParts):
        return {name: part.tagged() for name, part in value.items()}
    return value


def coerce(where: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type (lists become tuples, dicts become parts) or raise ConfigError."""
    return _coercion(hint)(where, value)


def _coercion(hint: Any) -> Coercion:
    """Return what values of an annotation become: configurations ask for each field of each part."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_coercion(a) for a in args if a is not type(None)]
        return functools.partial(_one_of, options, type(None) in args)
    if origin is Literal:
        return functools.partial(_literal, args, {type(a) for a in args})
    if origin is tuple:
        return functools.partial(_tuple, _coercion(args[0]))
    if origin is Mapping:
        return functools.partial(_parts, _coercion(args[1]))
    if isinstance(hint, type) and issubclass(hint, ConfigPart):
        return functools.partial(_part, hint)
    if hint is float:
        return _float
    return _integer if hint is int else functools.partial(_expect, hint)


def _one_of(options: list[Coercion], optional: bool, where: str, value: Any) -> Any:
    if value is None and optional:
        return None
    errors = []
    for option in options:
        try:
            return option(where, value)
        except ConfigError as error:
            errors.append(str(error))  # its words alone: the error holds every frame up to here, and this one it
    raise ConfigError(errors[0])


def _literal(args: tuple[Any, ...], kinds: set[type], where: str, value: Any) -> Any:
    if value not in args or type(value) not in kinds:
        check(False, where, value, ", ".join(map(repr, args)))
    return value


def _tuple(element: Coercion, where: str, value: Any) -> Any:
    check(isinstance(value, (list, tuple)), where, value, "a list")
    return tuple(element(f"{where}[{i}]", v) for i, v in enumerate(value))


def _parts(part: Coercion, where: str, value: Any) -> Any:
    check(isinstance(value, Mapping) and all(isinstance(n, str) for n in value), where, value, "parts by name")
    return NamedParts({name: part(f"{where}.{name}", its) for name, its in value.items()})


def _part(hint: type[ConfigPart], where: str, value: Any) -> Any:
    return hint.from_dict(value) if isinstance(value, dict) else _expect(hint, where, value)


def _float(where: str, value: Any) -> Any:
    check(isinstance(value, (int, float)) and not isinstance(value, bool), where, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    check(math.isfinite(number), where, value, "a finite number")
    return number


def _integer(where: str, value: Any) -> Any:
    check(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
    return value


def _expect(hint: type, where: str, value: Any) -> Any:
    if not isinstance(value, hint):
        check(False, where, value, {str: "a string", bool: "true or false"}.get(hint, f"a {hint.__name__}"))
    return value
