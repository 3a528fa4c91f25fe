"""The keys of a configuration: each with its type, its default, and the sentence written at its field.

Help on the command line, the tables of the documentation, and the options of `te-models train` are made of these.
"""

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .part import ConfigPart

WORDS = {int: "integer", float: "number", str: "string", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key. `path` is its name from the outermost table on ("data.text"); `hint` its annotation."""

    path: str
    hint: Any
    required: bool
    default: Any
    sentence: str

    @property
    def table(self) -> str:
        """The table that the key is in; "" for the outermost."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The name of the key in its table."""
        return self.path.rpartition(".")[2]

    @property
    def type(self) -> str:
        """The type in words, with the values where they are few."""
        return type_words(self.hint)

    @property
    def default_words(self) -> str:
        """The default as TOML writes it; "unset" where the key is left out, "required" where it may not be."""
        return "required" if self.required else toml_words(self.default)


@dataclass(frozen=True)
class KeyTable:
    """One table with its own keys, the tables in it left out. `name` is "" for the outermost; of one that a file may
    repeat, as [[name]], `repeated` is true."""

    name: str
    sentence: str
    keys: tuple[Key, ...]
    repeated: bool = False

    @property
    def heading(self) -> str:
        """The name as TOML writes it."""
        return f"[[{self.name}]]" if self.repeated else f"[{self.name}]"


def tables_of(part: type[ConfigPart], name: str = "", sentence: str = "", repeated: bool = False) -> Iterator[KeyTable]:
    """Yield the table of a part of a configuration, then those inside it, in the order of the fields.

    sentence: what it says of itself (default: the first sentence of the class).
    """
    docs, hints = field_docs(part), typing.get_type_hints(part)
    keys, inner = [], []
    for f in dataclasses.fields(part):
        path, hint = f"{name}.{f.name}".lstrip("."), hints[f.name]
        nested = nested_part(hint)
        if nested is not None:
            inner.append((nested, path, docs.get(f.name, ""), False))
            continue
        listed = listed_part(hint)
        if listed is not None:
            inner.append((listed, path, docs.get(f.name, ""), True))
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        keys.append(Key(path, hint, required, None if required else f.default, docs.get(f.name, "")))
    yield KeyTable(name, sentence or _first_sentence(part), tuple(keys), repeated)
    for table in inner:
        yield from tables_of(*table)


def nested_part(hint: Any) -> type[ConfigPart] | None:
    """Return the part that an annotation holds, where it holds one: a table in TOML."""
    return next((a for a in alternatives(hint) if isinstance(a, type) and issubclass(a, ConfigPart)), None)


def listed_part(hint: Any) -> type[ConfigPart] | None:
    """Return the part of which an annotation holds a list, where it does: a table that TOML may repeat."""
    return nested_part(typing.get_args(hint)[0]) if typing.get_origin(hint) is tuple else None


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union but None; an annotation that is no union, as its only member."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(a for a in typing.get_args(hint) if a is not type(None))
    return (hint,)


def may_be_unset(hint: Any) -> bool:
    """Whether None is a value of an annotation."""
    return type(None) in typing.get_args(hint)


def type_words(hint: Any) -> str:
    """Return an annotation in words: "integer", '"half" or "interleaved"', "list of numbers"."""
    words = []
    for member in alternatives(hint):
        if typing.get_origin(member) is Literal:
            words += [json.dumps(value) for value in typing.get_args(member)]
        elif typing.get_origin(member) is Mapping:
            words.append("tables by name")
        elif typing.get_origin(member) is tuple:
            of = typing.get_args(member)[0]
            part = nested_part(of) is not None
            words.append("list of " + ("tables" if part else f"{WORDS[of]}s" if of in WORDS else type_words(of)))
        else:
            words.append(WORDS[member])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def toml_words(value: Any) -> str:
    """Return a value as TOML writes it; "unset" for None."""
    if value is None:
        return "unset"
    if isinstance(value, Mapping):
        values = {name: part.tagged() if isinstance(part, ConfigPart) else part for name, part in value.items()}
        words = [f"{name} = {toml_words(inner)}" for name, inner in values.items() if inner is not None]
        return f"{{ {', '.join(words)} }}"
    return json.dumps([_plain(inner) for inner in value] if isinstance(value, tuple) else value)


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, ConfigPart) else value


@functools.cache
def field_docs(part: type[ConfigPart]) -> dict[str, str]:
    """Return the sentence below each field of a part, read from its source and the sources of the parts that it
    extends."""
    docs = {}
    for base in part.__bases__:
        if issubclass(base, ConfigPart) and base is not ConfigPart:
            docs |= field_docs(base)
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    assert isinstance(cls, ast.ClassDef)
    for node, below in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[node.target.id] = " ".join(value.value.split())
    return docs


def _first_sentence(part: type[ConfigPart]) -> str:
    first = " ".join((part.__doc__ or "").split())
    return first.partition(". ")[0].rstrip(".") + "."
