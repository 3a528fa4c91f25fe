"""How documents are read and tokenized: what `data` of a run, and the options of `te-models tokenize`, say of it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import DataError
from .formats import Fields, Format

Whether = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Options of `build_dataset`; each has the name, and the meaning, of the key in the table `data` of a run."""

    format: Format | None = None
    fields: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    join_parts: bool = False
    rewritten_chats: Literal["rows", "final"] = "rows"
    add_bos_token: Whether = "auto"
    add_eos_token: Whether = "auto"
    eos_token: str | None = None
    skip_bad_rows: bool = False

    def reading(self, text_field: str, messages_field: str | None) -> Fields:
        """Return how rows are read. Raises DataError for names that do not go together."""
        format: Format = self.format or ("text" if messages_field is None else "messages")
        names = pairs("fields", self.fields)
        if messages_field is not None:
            if format not in ("messages", "sharegpt"):
                raise DataError(f"messages_field is given for the format {format}, whose rows are no lists of messages")
            names.setdefault("messages", messages_field)
        if text_field != "text":
            if format != "text":
                raise DataError(f"text_field is given for the format {format}; allowed: with the format text")
            names.setdefault("text", text_field)
        return Fields(format, names, pairs("roles", self.roles), self.join_parts)

    def non_defaults(self) -> dict[str, Any]:
        """Return the options that are not at their defaults, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return what texts such as "content=value" say. Raises DataError for another form, and for a name twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise DataError(f'{option} has {text!r}; allowed: "name=name", as "content=value"')
        if name in found:
            raise DataError(f"{option} names {name!r} twice")
        found[name] = value
    return found
