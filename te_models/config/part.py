"""Values of a configuration: frozen, checked against their annotations when made, exact as dictionaries."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Self


class ConfigError(ValueError):
    """A configuration field has a value that is not allowed; the message names the field, the value and the choice."""


def check(condition: bool, where: str, value: object, allowed: str) -> None:
    """Raise ConfigError, naming the field `where`, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{where} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class ConfigPart:
    """Base of all configuration parts: exact dictionary round trip, and type checks on construction."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            object.__setattr__(
                self, f.name, _coerce(f"{type(self).__name__}.{f.name}", getattr(self, f.name), hints[f.name])
            )
        self._validate()

    def _validate(self) -> None:
        """Check relations between fields; raise ConfigError."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: dict, list, str, int, float, bool, None."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_dict`. An unknown or missing field raises ConfigError by name."""
        check(isinstance(values, dict), cls.__name__, values, "an object of named fields")
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no field {name!r}; its fields are: {', '.join(sorted(known))}")
        for name, f in known.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in values:
                raise ConfigError(f"{cls.__name__} needs the field {name!r}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the named fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigPart):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _coerce(where: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type (lists become tuples, dicts become parts) or raise ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _coerce(where, value, option)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[0])
    if origin is Literal:
        check(value in args and type(value) in {type(a) for a in args}, where, value, ", ".join(map(repr, args)))
        return value
    if origin is tuple:
        check(isinstance(value, (list, tuple)), where, value, "a list")
        return tuple(_coerce(f"{where}[{i}]", v, args[0]) for i, v in enumerate(value))
    if isinstance(hint, type) and issubclass(hint, ConfigPart):
        return hint.from_dict(value) if isinstance(value, dict) else _expect(where, value, hint)
    if hint is float:
        check(isinstance(value, (int, float)) and not isinstance(value, bool), where, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        check(math.isfinite(number), where, value, "a finite number")
        return number
    if hint is int:
        check(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
        return value
    return _expect(where, value, hint)


def _expect(where: str, value: Any, hint: type) -> Any:
    check(isinstance(value, hint), where, value, f"a {hint.__name__}")
    return value
