"""Several data sets, mixed by weight: which one is read at a position is a function of the position alone.

With weights w, of the first p windows data set 1 has floor(p w1 / (w1 + ... + wn)); the rest are divided among the
others in the same way, and so on. So counts are off by less than n from exact shares at any position, and the state
of a mixture is the position, as the state of one data set is. Weights are exact fractions: 0.1 is 1/10.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction

from .errors import DataError
from .windows import Batch, Windows


@dataclass(frozen=True)
class Blend:
    """Training windows of several data sets. parts: the windows of each; weights: of its windows, positive."""

    parts: tuple[Windows, ...]
    weights: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        if len({part.dataset.loss_mask is None for part in self.parts}) > 1:
            raise DataError("some data sets of the blend have a loss mask and others have none; allowed: one kind")

    def source(self, position: int) -> tuple[int, int]:
        """Return which data set is read at a position, and at which position of its own."""
        rest = sum(self.weights, Fraction(0))
        for i, weight in enumerate(self.weights[:-1]):
            share = weight / rest
            own = position * share.numerator // share.denominator
            if (position + 1) * share.numerator // share.denominator > own:
                return i, own
            position, rest = position - own, rest - weight
        return len(self.weights) - 1, position

    def examples(self, position: int, size: int) -> Batch:
        """Return windows `position` to `position + size - 1`."""
        sources = [self.source(p) for p in range(position, position + size)]
        return Batch.joined([self.parts[i].examples(own, 1) for i, own in sources])


def blend_digest(digests: list[str]) -> str:
    """Return one digest of several data sets, 64 hexadecimal digits; of one, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
