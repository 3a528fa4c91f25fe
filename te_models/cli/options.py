"""Options of a verb made of the fields of a configuration: their names, types, defaults and sentences."""

import argparse
import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from .parser import dtype, integer, number, positive_count

Part = Any  # a class of configurations, whose module takes a part of a second to import


@functools.cache
def fields_of(part: Part) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a configuration by name."""
    return {f.name: f for f in dataclasses.fields(part)}


def flag_of(part: Part, name: str) -> str:
    """Return the option of a field: of one that is true, what makes it false."""
    f = fields_of(part)[name]
    return f.metadata.get("flag") or ("--no-" if f.default is True else "--") + name.replace("_", "-")


def add_options(
    parser: argparse.ArgumentParser, part: Part, only: Collection[str] = (), flags: Mapping[str, str] | None = None
) -> None:
    """Add the options of a configuration's fields, of `only` these where there are any; each is an attribute of the
    parsed arguments by the field's name. flags: what fields are called that have another name here."""
    from ..config.keys import field_docs

    docs, hints = field_docs(part), typing.get_type_hints(part)
    for name in only or fields_of(part):
        _add(parser, (flags or {}).get(name) or flag_of(part, name), fields_of(part)[name], hints[name], docs[name])
    parser.set_defaults(part=part)


def size(text: str) -> int:
    """The value of an option that takes a size."""
    from te_models.checkpoints.write.shards import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add(parser: Any, flag: str, f: dataclasses.Field[Any], hint: Any, sentence: str) -> None:
    from ..config.keys import alternatives

    sentence = sentence.removeprefix("Whether ")
    sentence = (sentence[0].lower() if sentence[1:2].islower() else sentence[0]) + sentence[1:].rstrip(".")
    kinds, missing = alternatives(hint), f.default is dataclasses.MISSING
    default: Any = f.default
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    if bool in kinds and words:  # true, false, or as something else says
        one, name = parser.add_mutually_exclusive_group(), flag.removeprefix("--add-")
        one.add_argument(flag, dest=f.name, action="store_const", const=True, default=default, help=sentence)
        one.add_argument(f"--no-{name}", dest=f.name, action="store_const", const=False, default=default, help="never")
        return
    if bool in kinds:
        text = f"do not {sentence}" if default else sentence
        parser.add_argument(flag, dest=f.name, action="store_false" if default else "store_true", help=text)
        return
    listed = next((kind for kind in kinds if typing.get_origin(kind) is tuple), None)
    of = typing.get_args(listed)[0] if listed is not None else kinds[0]
    metavar = f.metadata.get("metavar") or (None if words else flag.lstrip("-").replace("-", "_").upper())
    whole = positive_count if f.metadata.get("least") else integer
    options: dict[str, Any] = {"type": dtype if f.name == "dtype" else {int: whole, float: number}.get(of, str)}
    if f.metadata.get("is_size"):
        options["type"] = size
    if listed is not None:
        options |= {"nargs": "+"} if of is int else {"action": "append"}
        default = default if default is None else list(default)
    shown = "" if missing or default in (None, []) else f" ({default})"
    options |= {"choices": words or None, "metavar": metavar, "required": missing}
    parser.add_argument(flag, dest=f.name, default=None if missing else default, help=sentence + shown, **options)
