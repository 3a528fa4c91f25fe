"""Configuration maps: Hugging Face's config.json <-> `ModelConfig`, as small values that read and write.

A map is a tuple of entries. Each reads some Hugging Face fields into flat `ModelConfig` paths ("attention.kv_channels")
and writes them back. Reading follows transformers: an absent field has the class's default. The default is part of the
entry, because files of older releases leave the field out.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from te_models.config import ModelConfig

from ...io.errors import CheckpointError

Values = dict[str, Any]
HFConfig = Mapping[str, Any]
"""The content of config.json."""
REQUIRED: Any = object()


class Entry(Protocol):
    """One entry of a configuration map."""

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face fields that this entry understands."""
        ...

    def read(self, hf: HFConfig) -> Values:
        """Return ModelConfig path -> value; paths may be left out to keep ModelConfig's default."""
        ...

    def write(self, config: ModelConfig) -> Values:
        """Return Hugging Face field -> value."""
        ...


@dataclass(frozen=True)
class OwnEntry:
    """Base of entries that one family needs, without arguments. It writes nothing unless a class says otherwise."""

    names: ClassVar[tuple[str, ...]] = ()

    def write(self, config: ModelConfig) -> Values:
        """Return Hugging Face field -> value."""
        return {}


def get_path(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a configuration, None below an absent part."""
    for name in path.split("."):
        if isinstance(config, Mapping):
            config = config.get(name)
        else:
            config = getattr(config, name) if config is not None else None
    return config


def read_typed(hf: HFConfig, name: str, kind: type, default: Any) -> Any:
    """Return field `name` as `kind`; `default` where it is absent.

    A default of REQUIRED makes absence an error; a default of None allows null as well.
    """
    value = hf.get(name, default)
    if value is REQUIRED:
        raise CheckpointError(f"config.json has no {name!r}")
    if value is None and (default is None or name not in hf):
        return None
    if kind is float and isinstance(value, int) and abs(value) < 2**53:
        value = value if isinstance(value, bool) else float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"config.json has {name} = {shorten_value(value)}, which is not {_KIND_NAMES[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"config.json has {name} out of range")
    return value


def shorten_value(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}


@dataclass(frozen=True)
class OfOneField:
    """What entries of one Hugging Face field share: its name, `hf`."""

    hf: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf,)


@dataclass(frozen=True)
class Field(OfOneField):
    """A field that means the same on both sides. `default` None also allows null: ModelConfig's own default. null: null
    means the default, too, because transformers takes it and computes the same."""

    path: str
    kind: type
    default: Any = REQUIRED
    null: bool = False

    def read(self, hf: HFConfig) -> Values:
        value = self.default
        if not self.null or hf.get(self.hf) is not None:
            value = read_typed(hf, self.hf, self.kind, self.default)
        return {} if value is None else {self.path: value}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: get_path(config, self.path)}


@dataclass(frozen=True)
class Nullable(OfOneField):
    """A number that may be null. Null differs from absent: an absent one has the class's `default`."""

    path: str
    default: float | None

    def read(self, hf: HFConfig) -> Values:
        value = hf.get(self.hf, self.default)
        return {self.path: None if value is None else read_typed(hf, self.hf, float, self.default)}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: get_path(config, self.path)}


@dataclass(frozen=True)
class Fixed:
    """A property that every model of the family has and transformers' class has no field for. names: fields that some
    published files mention it in all the same; nothing depends on them."""

    path: str
    value: Any
    names: tuple[str, ...] = ()

    def read(self, hf: HFConfig) -> Values:
        return {self.path: self.value}

    def write(self, config: ModelConfig) -> Values:
        return {}


def fixed(values: Mapping[str, Any]) -> tuple[Fixed, ...]:
    """Return the entries of properties, by path, that every model of the family has."""
    return tuple(Fixed(path, value) for path, value in values.items())


@dataclass(frozen=True)
class Choice(OfOneField):
    """A field whose values have other names; of several names of a value the default or the first is written."""

    path: str
    values: dict[str, str]
    default: str

    def read(self, hf: HFConfig) -> Values:
        value = read_typed(hf, self.hf, str, self.default)
        if value not in self.values:
            raise CheckpointError(
                f"config.json has {self.hf} = {shorten_value(value)}; supported: {', '.join(self.values)}"
            )
        return {self.path: self.values[value]}

    def write(self, config: ModelConfig) -> Values:
        inverse = {ours: theirs for theirs, ours in reversed(self.values.items())}
        inverse[self.values[self.default]] = self.default
        return {self.hf: inverse.get(get_path(config, self.path))}


@dataclass(frozen=True)
class Spread(OfOneField):
    """A field that sets several paths to the same value; with `null` null means the default, too."""

    paths: tuple[str, ...]
    default: bool = False
    null: bool = False

    def read(self, hf: HFConfig) -> Values:
        absent = self.null and hf.get(self.hf) is None
        return dict.fromkeys(self.paths, self.default if absent else read_typed(hf, self.hf, bool, self.default))

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: get_path(config, self.paths[0])}


@dataclass(frozen=True)
class OneOf:
    """A field that releases name differently; where several are present they must agree. The first is written."""

    names: tuple[str, ...]
    path: str
    kind: type
    default: Any = REQUIRED

    def read(self, hf: HFConfig) -> Values:
        found = {name: read_typed(hf, name, self.kind, REQUIRED) for name in self.names if name in hf}
        if len(set(found.values())) > 1:
            raise CheckpointError("config.json has " + " and ".join(f"{n} = {hf[n]}" for n in found))
        value = next(iter(found.values())) if found else read_typed({}, self.names[0], self.kind, self.default)
        return {self.path: value}

    def write(self, config: ModelConfig) -> Values:
        return {self.names[0]: get_path(config, self.path)}


@dataclass(frozen=True)
class Renamed:
    """An entry that writes some of its fields under another name; theirs is read, too, where they agree."""

    entry: Entry
    others: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.entry.names, *(self.others[name] for name in self.entry.names if name in self.others))

    def read(self, hf: HFConfig) -> Values:
        found = {}
        for name in self.entry.names:
            other = self.others.get(name)
            if other is None or other not in hf:
                continue
            if name in hf and hf[name] != hf[other]:
                raise CheckpointError(f"config.json has {name} = {hf[name]} and {other} = {hf[other]}")
            found[name] = hf[other]
        return self.entry.read({**hf, **found})

    def write(self, config: ModelConfig) -> Values:
        return {self.others.get(name, name): value for name, value in self.entry.write(config).items()}


def renamed(entries: Iterable[Entry], others: Mapping[str, str]) -> tuple[Entry, ...]:
    """Return entries of which those that read a field in `others` read it by its other name."""
    return tuple(Renamed(entry, others) if set(entry.names) & set(others) else entry for entry in entries)


@dataclass(frozen=True)
class Filled:
    """An entry whose fields are `values` where the file leaves them out, which the entry itself would read otherwise;
    REQUIRED: a file must have the field."""

    entry: Entry
    values: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return self.entry.names

    def read(self, hf: HFConfig) -> Values:
        for name, value in self.values.items():
            if value is REQUIRED and name not in hf:
                raise CheckpointError(f"config.json has no {name!r}")
        return self.entry.read({**self.values, **hf})

    def write(self, config: ModelConfig) -> Values:
        return self.entry.write(config)


@dataclass(frozen=True)
class Only(OfOneField):
    """A field whose other values would change the model: absent or `value` when read, `value` when written; with `null`
    also null."""

    value: Any
    null: bool = False

    def read(self, hf: HFConfig) -> Values:
        value = hf.get(self.hf, self.value)
        if value is None and self.null:
            return {}
        if value != self.value or type(value) is not type(self.value):
            raise CheckpointError(f"config.json has {self.hf} = {shorten_value(value)}; supported: {self.value!r}")
        return {}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: self.value}


@dataclass(frozen=True)
class SameAs(OfOneField):
    """A number that another field, `of`, has, too; it means `path`: null, absent, or the same. default: of `of`."""

    of: str
    path: str
    default: Any = REQUIRED

    def read(self, hf: HFConfig) -> Values:
        value, other = read_typed(hf, self.hf, int, None), read_typed(hf, self.of, int, self.default)
        if value not in (None, other):
            raise CheckpointError(f"config.json has {self.hf} = {value}; supported: null or {other}, {self.of}")
        return {}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: get_path(config, self.path)}


@dataclass(frozen=True)
class Flag(OfOneField):
    """A field that is true or false: the paths and their values where it is one, and where it is the other; with `null`
    null means the default, too."""

    true: tuple[tuple[str, Any], ...]
    false: tuple[tuple[str, Any], ...]
    default: bool = False
    null: bool = False

    def read(self, hf: HFConfig) -> Values:
        absent = self.null and hf.get(self.hf) is None
        said = self.default if absent else read_typed(hf, self.hf, bool, self.default)
        return dict(self.true if said else self.false)

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: all(get_path(config, path) == value for path, value in self.true)}


def switch(hf: str, path: str, on: Any, off: Any, default: bool = False, *, null: bool = False) -> Flag:
    """Return the entry of a field whose true means `on` at a path, and whose false `off`; null: see `Flag`."""
    return Flag(hf, ((path, on),), ((path, off),), default, null)


@dataclass(frozen=True)
class Converted(OfOneField):
    """A number that ModelConfig keeps as another one: `to_ours` of it, and `to_theirs` of that.

    Division and square roots do not always invert exactly; a whole number that gives the same value is preferred, and
    written as an integer if `whole`, because transformers' class allows nothing else.
    """

    path: str
    default: float
    to_ours: Callable[[float], float]
    to_theirs: Callable[[float], float]
    whole: bool = False

    def read(self, hf: HFConfig) -> Values:
        value = read_typed(hf, self.hf, float, self.default)
        if not value > 0:
            raise CheckpointError(f"config.json has {self.hf} = {value}; allowed: a positive number")
        return {self.path: self.to_ours(value)}

    def write(self, config: ModelConfig) -> Values:
        ours = get_path(config, self.path)
        if not ours:
            return {}
        try:
            theirs = self.to_theirs(ours)
            near = [float(round(theirs)), theirs, math.nextafter(theirs, 0), math.nextafter(theirs, math.inf)]
            value = next((x for x in near if x > 0 and self.to_ours(x) == ours), theirs)
        except OverflowError:  # no such number: the comparison with what is read back names the field
            return {}
        return {self.hf: int(value) if self.whole and value.is_integer() else value}
