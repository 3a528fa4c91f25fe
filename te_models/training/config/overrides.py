"""The keys of a training configuration as options of a command: `--data.micro-batch-size 4`, `--no-compile`.

Every key has an option, dots for tables and dashes for underscores (underscores are taken, too). The options are made
of the annotations of the configuration; `file` checks the values together with the TOML file's values.
"""

import argparse
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

from ...config import ConfigError
from ...config.keys import Key, alternatives, listed_part, may_be_unset, tables_of, type_words
from ...suggestions import did_you_mean
from .run import TrainConfig


@dataclass(frozen=True)
class Override:
    """A key that an option gives a value. words: the option and its values, as they were written."""

    path: str
    option: str
    value: Any
    words: tuple[str, ...]


def add_key_options(parser: argparse.ArgumentParser, *, shown: bool = False) -> None:
    """Add the option of each key to a parser; parsed arguments have a list `overrides`.

    shown: in the help, too (it is long then), and only with dashes.
    """
    parser.set_defaults(overrides=[])
    for table in tables_of(TrainConfig):
        for key in () if table.repeated else table.keys:
            options = partial(parser.add_argument, dest="overrides", action=_SetKey, key=key)
            sentence = key.sentence.replace("%", "%%") if shown else argparse.SUPPRESS
            if key.hint is bool:
                before, dot, name = key.path.rpartition(".")
                options(*_spellings(key.path, shown), nargs=0, help=sentence)
                options(*_spellings(f"{before}{dot}no-{name}", shown), nargs=0, off=True, help=sentence)
            else:
                # completion reads the choices; values are checked together with the file's values
                choices, nargs = _choices(key.hint) if shown else None, "*" if _is_list(key.hint) else None
                options(*_spellings(key.path, shown), nargs=nargs, choices=choices, help=sentence)


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Return what options such as `["--optimizer.lr", "1e-4"]` set. Raises ConfigError for anything else."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_key_options(parser)
    args, rest = parser.parse_known_args(words)
    if rest:
        raise ConfigError(unknown_option(rest, parser))
    return args.overrides


def unknown_option(rest: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the sentence for words that a parser left over: the first option among them, or the first word."""
    option = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
    if option is None:
        return f"{rest[0]!r} belongs to no option"
    return f"{option!r} is no option{did_you_mean(option, parser._option_string_actions)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.replace("expected one argument", "a value is missing")
        raise ConfigError(message.removeprefix("argument "))


class _SetKey(argparse.Action):
    """Adds an Override to the list."""

    def __init__(self, option_strings: Sequence[str], dest: str, key: Key, off: bool = False, **rest: Any) -> None:
        rest |= {"metavar": None if rest["nargs"] == 0 else type_words(key.hint), "default": argparse.SUPPRESS}
        super().__init__(option_strings, dest, **rest)
        self.key, self.off = key, off

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else list(values or ())
        option = option_string or self.option_strings[0]
        if _is_list(self.key.hint) and len(words) == 1 and words[0][:2] in ("[]", '["', "['"):
            raise ConfigError(f"{option} is {words[0]!r}; allowed: no value, or several, as in {option} A B")
        if self.nargs == 0:
            value: Any = not self.off
        else:
            read = [_from_word(word, self.key.hint) for word in words]
            value = None if read == [None] else read if _is_list(self.key.hint) else read[0]
        override = Override(self.key.path, option, value, (option, *words))
        namespace.overrides = [*namespace.overrides, override]


def _spellings(path: str, only_dashes: bool) -> list[str]:
    """Return the option of a key with dashes, and with underscores as the file has them."""
    dashes = f"--{path.replace('_', '-')}"
    return list(dict.fromkeys([dashes, dashes if only_dashes else f"--{path}"]))


def _choices(hint: Any) -> list[Any] | None:
    """The values of an annotation that lists them."""
    found = [choice for a in alternatives(hint) if typing.get_origin(a) is Literal for choice in typing.get_args(a)]
    return found or None


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(member) is tuple for member in alternatives(hint))


def _from_word(word: str, hint: Any) -> Any:
    """Return what a word stands for: None, or a number where the key takes one and the word is one, or the word."""
    if may_be_unset(hint) and word.lower() in ("none", "null"):
        return None
    if listed_part(hint) is not None:  # a table, as TOML writes it in a line
        try:
            return tomllib.loads(f"table = {word}")["table"]
        except tomllib.TOMLDecodeError:
            return word
    for member in alternatives(hint):
        kind = typing.get_args(member)[0] if typing.get_origin(member) is tuple else member
        if kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                continue
    return word
