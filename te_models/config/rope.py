"""Rotary position embedding and its context extensions."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class RopeConfig(ConfigPart):
    """Rotary position embedding (arXiv 2104.09864) and its context extensions. A field set for another extension than
    `scaling` is refused."""

    rotary_base: float = 10000.0
    """Base of the frequencies (theta)."""
    rotary_percent: float = 1.0
    """Fraction of each head's channels that is rotated."""
    style: Literal["half", "interleaved"] = "half"
    """Channels that are rotated together: (i, i + D/2) in half, (2i, 2i + 1) in interleaved."""
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"] = "none"
    """Context extension; the keys below are read only by the extension that needs them."""
    factor: float | None = None
    """How many times longer the context becomes."""
    original_max_position_embeddings: int | None = None
    """Longest sequence before the extension, in tokens."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above the original context over this number are divided by the factor."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below the original context over this number are kept."""
    beta_fast: float | None = None
    """yarn: rotations within the original context above which a frequency is kept."""
    beta_slow: float | None = None
    """yarn: rotations within the original context below which a frequency is divided by the factor."""
    mscale: float | None = None
    """yarn: weight of the logarithm in the factor of cos and sin."""
    mscale_all_dim: float | None = None
    """yarn: the same weight in the factor by which that one is divided."""
    attention_factor: float | None = None
    """yarn, longrope: factor of cos and sin; unset means the published formula."""
    truncate: bool | None = None
    """yarn: whether the channels between which frequencies are blended are rounded to whole numbers."""
    alpha: float | None = None
    """dynamic: extends the base by a power of this number at every length, in place of factor."""
    short_factor: tuple[float, ...] | None = None
    """longrope: divisor of each frequency for sequences up to the original context."""
    long_factor: tuple[float, ...] | None = None
    """longrope: divisor of each frequency for longer sequences."""

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
        told = self.scaling != "dynamic" or (self.factor, self.alpha) != (None, None)
        check(told, "rope.factor", None, "a value, or one of rope.alpha, because rope.scaling is 'dynamic'")
        check(self.factor is None or self.factor > 0, "rope.factor", self.factor, "a positive number")
        original = self.original_max_position_embeddings
        check(original is None or original > 0, "rope.original_max_position_embeddings", original, "a positive integer")
