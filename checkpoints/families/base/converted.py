"""A field whose number is a function of the configuration's: a square, a reciprocal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .fields import Values, get_path, read_typed


@dataclass(frozen=True)
class Converted:
    """A number that ModelConfig keeps as another one: `to_ours` of it, and `to_theirs` of that.

    Division and square roots do not always invert exactly; a whole number that gives the same value is preferred, and
    written as an integer if `whole`, because transformers' class allows nothing else.
    """

    hf: str
    path: str
    default: float
    to_ours: Callable[[float], float]
    to_theirs: Callable[[float], float]
    whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf,)

    def read(self, hf: Mapping[str, Any]) -> Values:
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
