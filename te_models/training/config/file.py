"""A training configuration read from a TOML file and the options beside it: what is wrong is named as it is written.

A sentence names the file, the table and the key, "run.toml: [data] sequence_length is ...", or the option,
"--data.sequence-length is ...", whichever the value came from.
"""

import dataclasses
import tomllib
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ...config import ConfigError, ConfigPart
from ...config.keys import alternatives, listed_part, may_be_unset, nested_part, tables_of
from ...config.part import coerce
from ...suggestions import OF_OTHER_TRAINERS, did_you_mean
from .overrides import Override, parse_overrides
from .run import TrainConfig

UNSET = "none"
"""What a file says for a key that is to have no value, since TOML has no word for that."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply command-line overrides such as `["--optimizer.lr", "1e-4"]`.

    Relative paths in the file stay relative to the working directory. Raises ConfigError with one sentence for a
    missing file, malformed TOML, an unknown key or option, or a bad value.
    """
    return read_config(Path(path), parse_overrides(overrides))


def read_config(path: Path, overrides: Iterable[Override] = ()) -> TrainConfig:
    """Read a TrainConfig from a TOML file, with options in place of the keys that they name."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the training configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    names = _Names(path, {})
    for override in overrides:
        table = values
        *outer, key = override.path.split(".")
        for depth, name in enumerate(outer):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{names.key('.'.join(outer[: depth + 1]))} is {table!r}; allowed: a table")
        table[key] = override.value
        names.options[override.path] = override.option
    _balance(values)
    return _read(TrainConfig, values, "", names)


BALANCE = 1e-2
"""Coefficient of the load-balancing loss of a mixture that a file defines without a word on the balance of its experts
(Switch Transformer, arXiv 2101.03961, section 2.2): without one, experts collapse within tens of steps."""


def _balance(values: dict[str, Any]) -> None:
    """Give the mixture that a file defines, if it does, a load-balancing loss, unless it says how it is balanced."""
    moe: Any = values
    for table in ("model", "config", "moe"):
        moe = moe.get(table) if isinstance(moe, dict) else None
    router = moe.get("router") if isinstance(moe, dict) else None
    if isinstance(moe, dict) and not (isinstance(router, dict) and "expert_bias" in router):
        moe.setdefault("aux_loss_coeff", BALANCE)


@dataclasses.dataclass(frozen=True)
class _Names:
    """What tables and keys are called in sentences. options: the option of each key that was given by one."""

    file: Path
    options: dict[str, str]

    def table(self, path: str) -> str:
        name, _, number = path.partition("#")
        if number:
            return f"{self.options.get(name) or f'{self.file}: [[{name}]]'} table {number}"
        return f"{self.file}: [{path}]" if path else str(self.file)

    def key(self, path: str) -> str:
        table, _, key = path.rpartition(".")
        return self.options.get(path) or (f"{self.table(table)} {key}" if table else f"{self.file}: {key}")


def _read(part: type[ConfigPart], values: dict[str, Any], table: str, names: _Names) -> Any:
    """Build a part of the configuration from its table."""
    hints, fields = typing.get_type_hints(part), {f.name: f for f in dataclasses.fields(part)}
    read = {}
    for name, value in values.items():
        if name not in fields:
            allowed = f"allowed: {', '.join(fields)}{_similar(name, fields)}"
            raise ConfigError(f"{names.table(table)} has no key {name!r}; {allowed}")
        path = f"{table}.{name}".lstrip(".")
        nested, listed = nested_part(hints[name]), listed_part(hints[name])
        if listed is not None:
            if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
                raise ConfigError(f"{names.key(path)} is {value!r}; allowed: a list of tables, each as [[{path}]]")
            read[name] = [_read(listed, inner, f"{path}#{number}", names) for number, inner in enumerate(value, 1)]
        elif nested is None:
            read[name] = _leaf(value, hints[name], names.key(path))
        elif isinstance(value, dict):
            read[name] = _read(nested, value, path, names)
        else:
            raise ConfigError(f"{names.key(path)} is {value!r}; allowed: a table of keys")
    for name, f in fields.items():
        if name not in read and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            what = f"table [{table + '.' if table else ''}{name}]" if nested_part(hints[name]) else f"key {name!r}"
            raise ConfigError(f"{names.table(table)} needs the {what}")
    try:
        return part.from_dict(read)
    except ConfigError as error:
        if not error.where:  # about the model, whose keys the sentence names
            raise ConfigError(f"{names.table(table)}: {error}") from None
        outer, _, rest = error.where.partition(".")
        key = error.where if outer in fields else rest  # the checks of a part may begin with its own name
        key = key.rpartition(".")[2] if "#" in table else key
        path = ".".join(word for word in (table, key) if word)
        name = names.key(path) if key else names.table(table)
        what, allowed, choices = str(error).removeprefix(error.where).partition("; allowed: ")
        raise ConfigError(name + what + allowed + choices.replace("null", "unset")) from None  # TOML has no null


def _leaf(value: Any, hint: Any, where: str) -> Any:
    """Return the value of a key as its annotation says."""
    choices = [choice for a in alternatives(hint) if typing.get_origin(a) is Literal for choice in typing.get_args(a)]
    if value == UNSET and may_be_unset(hint) and str not in alternatives(hint) and UNSET not in choices:
        return None
    try:
        return coerce(where, value, hint)
    except ConfigError as error:
        raise ConfigError(f"{error}{did_you_mean(value, choices) if isinstance(value, str) else ''}") from None


def _similar(name: str, fields: Iterable[str]) -> str:
    """Suggest the key that other trainers call so, the key or table of the same name elsewhere, or a similar one of the
    same table."""
    if name in OF_OTHER_TRAINERS:
        table, _, key = OF_OTHER_TRAINERS[name].rpartition(".")
        return f"; did you mean [{table}] {key}?" if table else f"; did you mean {key} before the first table?"
    tables = list(tables_of(TrainConfig))
    elsewhere = [f"[{table.name}]" for table in tables if table.name.rpartition(".")[2] == name]
    for key in (key for table in tables for key in table.keys if key.name == name):
        elsewhere.append(f"[{key.table}] {name}" if key.table else f"{name} before the first table")
    return f"; did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else did_you_mean(name, fields)
