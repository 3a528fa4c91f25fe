"""Tables of keys with a reason each, and their text."""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..config import ConfigError, ConfigPart, ModelConfig
from ..config.keys import may_be_unset, nested_part, toml_words

_WIDTH = 36
"""Columns of a key and its value in front of a comment."""


class Tables:
    """Keys by table, in the order in which each table was begun."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, tuple[Any, str]]] = {}

    def add(self, table: str, key: str, value: Any, why: str = "") -> None:
        """Add a key, and the reason for its value, if it was decided here."""
        self._tables.setdefault(table, {})[key] = value, why

    def merged(self, other: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the plain values, with the keys of further tables."""
        found: dict[str, Any] = {}
        for name, keys in self._tables.items():
            inner = found
            for word in name.split(".") if name else ():
                inner = inner.setdefault(word, {})
            inner.update({key: value for key, (value, _) in keys.items()})
        for name, more in other.items():
            found.setdefault(name, {}).update(more)
        return found

    def text(self) -> str:
        """Return the TOML; tables inside others follow them."""
        return "\n".join("".join(self._lines(name)) for name in sorted(self._tables, key=self._place))

    def _place(self, name: str) -> tuple[int, str]:
        outer = name.partition(".")[0]
        first = min(i for i, table in enumerate(self._tables) if table.partition(".")[0] == outer)
        return first, name

    def _lines(self, name: str) -> Iterator[str]:
        if name:
            yield f"[{name}]\n"
        for key, (value, why) in self._tables[name].items():
            line = f"{key} = {toml_words(value)}"
            yield f"{line:{_WIDTH}} # {why}\n" if why else f"{line}\n"


def changed_keys(model: ModelConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield table, key and value of all that is required, and of all without which the model is another one."""
    yield from _changed(model, "model.config", model, lambda part: part)


def _changed(
    model: ModelConfig, table: str, part: ConfigPart, with_part: Callable[[Any], Any]
) -> Iterator[tuple[str, str, Any]]:
    """Yield the same of one part. with_part: makes the model with another in its place."""
    hints = typing.get_type_hints(type(part))
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if isinstance(value, ConfigPart):
            assert nested_part(hints[f.name])
            name = f.name
            inner = list(
                _changed(model, f"{table}.{name}", value, lambda new, name=name: with_part(part.replace(**{name: new})))
            )
            if not inner and f.default is None:  # a part that there may be, with its defaults: one key says that it is
                known = value.to_dict()
                inner = [(f"{table}.{f.name}", *next((k, v) for k, v in known.items() if v is not None))]
            yield from inner
            continue
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if default is dataclasses.MISSING or (value != default and _differs(model, with_part, part, f.name, default)):
            assert value is not None or may_be_unset(hints[f.name])
            yield table, f.name, "none" if value is None else value


def _differs(model: ModelConfig, with_part: Callable[[Any], Any], part: ConfigPart, key: str, default: Any) -> bool:
    """Return whether the model with the default of a key is another one, or none: a default of None is what follows
    from other keys."""
    try:
        return with_part(part.replace(**{key: default})) != model
    except ConfigError:
        return True
