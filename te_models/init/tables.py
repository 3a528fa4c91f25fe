"""Tables of keys with a reason each, and their text."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigPart, ModelConfig
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
    """Yield table, key and value of all that differs from a model of which only the required keys are said."""
    yield from _changed(model, _required(model), "model.config")


def _required(part: ConfigPart) -> ConfigPart:
    """Return a part with the same required keys alone."""
    values = {}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if isinstance(value, ConfigPart):
            values[f.name] = _required(value)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            values[f.name] = value
    return type(part)(**values)


def _changed(part: ConfigPart, plain: ConfigPart, table: str) -> Iterator[tuple[str, str, Any]]:
    hints = typing.get_type_hints(type(part))
    for f in dataclasses.fields(part):
        value, before = getattr(part, f.name), getattr(plain, f.name)
        if isinstance(value, ConfigPart):
            assert isinstance(before, ConfigPart) and nested_part(hints[f.name])
            inner = list(_changed(value, before, f"{table}.{f.name}"))
            if not inner and f.default is None:  # a part that there may be, with its defaults: one key says that it is
                known = value.to_dict()
                inner = [(f"{table}.{f.name}", *next((k, v) for k, v in known.items() if v is not None))]
            yield from inner
            continue
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required or value != before:
            assert value is not None or may_be_unset(hints[f.name])
            yield table, f.name, "none" if value is None else value
