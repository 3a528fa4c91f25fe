"""Several data sets, mixed by weight: which one is read at a position is a function of the position alone.

With weights w, of the first p windows data set 1 has floor(p w1 / (w1 + ... + wn)); the rest are divided among the
others in the same way, and so on. So counts are off by less than n from exact shares at any position, and the state
of a mixture is the position, as the state of one data set is. Weights are exact fractions: 0.1 is 1/10. They may change
at positions that are known before (a curriculum): counts of earlier stages are computed in the same way.
"""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from .windows import Batch, Windows, labelled_alike


@dataclass(frozen=True)
class Blend:
    """Training windows of several data sets. parts: the windows of each; weights: of its windows, zero or positive.
    later: the weights from a position on, in ascending order: each stage goes on in every data set where the one before
    it ended, so that the position is still the whole state."""

    parts: tuple[Windows, ...]
    weights: tuple[Fraction, ...]
    later: tuple[tuple[int, tuple[Fraction, ...]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", labelled_alike(self.parts))

    @cached_property
    def _stages(self) -> list[tuple[int, tuple[Fraction, ...], list[int]]]:
        """Of each stage its position, its weights, and how many windows of each data set are read before it."""
        found = [(0, self.weights, [0] * len(self.weights))]
        for begin, weights in self.later:
            before, old, read = found[-1]
            more = _counts(begin - before, old)
            found.append((begin, weights, [a + b for a, b in zip(read, more, strict=True)]))
        return found

    def source(self, position: int) -> tuple[int, int]:
        """Return which data set is read at a position, and at which position in it."""
        stage = bisect_right(self._stages, position, key=lambda stage: stage[0]) - 1
        begin, weights, read = self._stages[stage]
        position -= begin
        rest = sum(weights, Fraction(0))
        for i, weight in enumerate(weights[:-1]):
            share = weight / rest
            own = position * share.numerator // share.denominator
            if (position + 1) * share.numerator // share.denominator > own:
                return i, read[i] + own
            position, rest = position - own, rest - weight
        return len(weights) - 1, read[-1] + position

    def examples(self, position: int, size: int) -> Batch:
        """Return windows `position` to `position + size - 1`."""
        sources = [self.source(p) for p in range(position, position + size)]
        return Batch.joined([self.parts[i].examples(own, 1) for i, own in sources])


def _counts(windows: int, weights: tuple[Fraction, ...]) -> list[int]:
    """Return how many of the first windows are of each data set."""
    found, rest = [], sum(weights, Fraction(0))
    for weight in weights[:-1]:
        share = weight / rest if rest else Fraction(0)
        found.append(windows * share.numerator // share.denominator)
        windows, rest = windows - found[-1], rest - weight
    return [*found, windows]


def blend_digest(digests: list[str]) -> str:
    """Return one digest of several data sets, 64 hexadecimal digits; of one, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
