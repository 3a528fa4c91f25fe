"""The keys of a configuration as text: what `train --help-keys` and `info --keys` print."""

import textwrap
from collections.abc import Sequence
from typing import Any

from ...config.keys import KeyTable, toml_words
from ...suggestions import did_you_mean
from ..parser import help_width


def select_tables(tables: Sequence[KeyTable], name: str, option: str) -> list[KeyTable]:
    """Return the table of this name and those inside it; all for "". Raises ValueError for a name that none has."""
    known = [table.name for table in tables if table.name]
    if name and name not in known:
        raise ValueError(f"{option} is {name!r}; allowed: {', '.join(known)}{did_you_mean(name, known)}")
    return [table for table in tables if not name or table.name == name or table.name.startswith(f"{name}.")]


def keys_text(tables: Sequence[KeyTable], values: dict[str, Any] | None = None) -> str:
    """Return tables with their keys, the types and defaults, and a sentence each.

    values: a whole configuration, as plain values; keys that differ from their defaults are shown with theirs.
    """
    return "\n\n".join(_table_text(table, values) for table in tables)


def keys_json(tables: Sequence[KeyTable]) -> list[dict[str, Any]]:
    """Return the keys as plain JSON values."""
    return [
        {
            "table": key.table,
            "key": key.name,
            "type": key.type,
            "required": key.required,
            "default": key.default,
            "sentence": key.sentence,
        }
        for table in tables
        for key in table.keys
    ]


def _table_text(table: KeyTable, values: dict[str, Any] | None) -> str:
    heading = f"{table.heading}  {table.sentence}" if table.name else table.sentence
    lines = textwrap.wrap(heading, help_width(), **_indents(0, 2))
    for key in table.keys:
        default = f" = {toml_words(key.default)}" if not key.required and key.default is not None else ""
        about = key.type + (", required" if key.required else "" if default else ", unset")
        present, value = _value(values, key.path)
        if present and (key.required or value != _plain(key.default)):
            about += f"; here {toml_words(value)}"
        lines += textwrap.wrap(f"{key.name}{default}  ({about})", help_width(), **_indents(2, 6))
        lines += textwrap.wrap(key.sentence, help_width(), **_indents(6, 6))
    return "\n".join(lines)


def _indents(first: int, others: int) -> dict[str, Any]:
    # a name with hyphens stays whole
    return {"initial_indent": " " * first, "subsequent_indent": " " * others, "break_on_hyphens": False}


def _value(values: Any, path: str) -> tuple[bool, Any]:
    """Return whether a configuration has a key, and its value."""
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False, None
        values = values[name]
    return True, values


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
