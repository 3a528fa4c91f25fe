"""Rotary position embedding and its context extensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class RopeConfig(ConfigPart):
    """Rotary position embedding (arXiv 2104.09864) and its context extensions.

    `style`: "half" rotates (i, i + D/2), "interleaved" rotates (2i, 2i + 1). `rotary_percent` is the rotated fraction
    of the head dimension. `scaling` names the extension; the fields under it are read only by that extension, and a
    field set for another one is refused.
    """

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    style: Literal["half", "interleaved"] = "half"
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"] = "none"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    alpha: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    _FIELDS_OF: ClassVar[dict[str, tuple[set[str], set[str]]]] = {
        # scaling: (required, optional)
        "none": (set(), set()),
        "linear": ({"factor"}, set()),
        "dynamic": (set(), {"factor", "alpha", "original_max_position_embeddings"}),
        "yarn": (
            {"factor"},
            {
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "attention_factor",
                "truncate",
            },
        ),
        "longrope": (
            {"short_factor", "long_factor"},
            {"factor", "original_max_position_embeddings", "attention_factor"},
        ),
        "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
        "proportional": (set(), {"factor"}),
    }

    def _validate(self) -> None:
        check(self.rotary_base > 0, "rope.rotary_base", self.rotary_base, "a positive number")
        check(0 < self.rotary_percent <= 1, "rope.rotary_percent", self.rotary_percent, "0 < fraction <= 1")
        required, optional = self._FIELDS_OF[self.scaling]
        every = set().union(*(r | o for r, o in self._FIELDS_OF.values()))
        for name in sorted(every):
            value = getattr(self, name)
            if name in required:
                check(value is not None, f"rope.{name}", value, f"a value, because rope.scaling is {self.scaling!r}")
            elif name not in optional:
                check(value is None, f"rope.{name}", value, f"null, because rope.scaling is {self.scaling!r}")
        check(self.factor is None or self.factor > 0, "rope.factor", self.factor, "a positive number")
        original = self.original_max_position_embeddings
        check(original is None or original > 0, "rope.original_max_position_embeddings", original, "a positive integer")
