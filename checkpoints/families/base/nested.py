"""Entries of a configuration within a configuration, and of flags that must agree with each other."""

from collections.abc import Callable
from dataclasses import dataclass

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, Entry, HFConfig, OfOneField, Values, read_typed, shorten_value


@dataclass(frozen=True)
class Within(OfOneField):
    """`hf`, a nested object whose fields `entries` read; absent or null, they have their defaults."""

    entries: tuple[Entry, ...]

    def read(self, hf: HFConfig) -> Values:
        values = hf.get(self.hf)
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise CheckpointError(f"config.json has {self.hf} = {shorten_value(values)}, which is not an object")
        return {path: value for entry in self.entries for path, value in entry.read(values).items()}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: {name: value for entry in self.entries for name, value in entry.write(config).items()}}


@dataclass(frozen=True)
class Repeated(OfOneField):
    """A field that another entry reads, and that this one writes unless it is zero. value: of a model."""

    value: Callable[[ModelConfig], float]

    def read(self, hf: HFConfig) -> Values:
        return {}

    def write(self, config: ModelConfig) -> Values:
        value = self.value(config)
        return {self.hf: value} if value else {}


@dataclass(frozen=True)
class TimesHidden:
    """The MLP's width, `hf`, by default a multiple of the hidden size, where it is null or absent; hf None: there is no
    field, and the width is always that. hidden: the names of hidden_size."""

    hf: str | None
    hidden: tuple[str, ...] = ("hidden_size",)
    times: int = 4
    default_hidden: int = REQUIRED

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.hf is None else (self.hf,)

    def read(self, hf: HFConfig) -> Values:
        size = None if self.hf is None else read_typed(hf, self.hf, int, None)
        if size is None:
            name = next((name for name in self.hidden if name in hf), self.hidden[0])
            size = self.times * read_typed(hf, name, int, self.default_hidden)
        return {"mlp.ffn_hidden_size": size}

    def write(self, config: ModelConfig) -> Values:
        return {} if self.hf is None else {self.hf: config.mlp.ffn_hidden_size}
