"""Preference pairs as windows: a window is the two answers of a pair, a row each.

A data set of pairs, built with the format `preference_pairs`, has the documents chosen, rejected, chosen, rejected and
so on. Each is the beginning of a row, filled up with padding that does not count: behind it, causal, it changes no
token before.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from te_models.kernels.cross_entropy import IGNORE_INDEX

from ...sizes import plural
from .dataset import TokenDataset, read_meta
from .errors import DataError
from .windows import Batch, Windows

FORMAT = "preference_pairs"


def has_pairs(dataset: TokenDataset) -> bool:
    """Whether a data set was built from preference pairs, both answers of each."""
    source = read_meta(dataset.path).get("source") or {}
    return bool((source.get("options") or {}).get("format") == FORMAT)


@dataclass(frozen=True)
class Pairs(Windows):
    """One split of a data set of pairs; see `Windows`. skip_long: whether pairs with an answer of more than
    sequence_length tokens are passed over. Raises DataError for such pairs without it, and where no pair is left."""

    skip_long: bool = False

    def __post_init__(self) -> None:
        total, usable = self.dataset.num_documents // 2, len(self._usable)
        if usable < total and not self.skip_long:
            raise DataError(
                f"{self.dataset.path} has {plural(total - usable, 'pair')} of {total} with more than "
                f"{plural(self.sequence_length, 'token')} in an answer (the longest has {int(self._lengths.max())}); "
                "allowed: a longer data.sequence_length, or data.skip_bad_rows = true, which passes over them"
            )
        if len(self) == 0:
            raise DataError(
                f"{self.dataset.path} has {plural(usable, 'pair')} of at most "
                f"{plural(self.sequence_length, 'token')}: not one {self.split} window "
                f"with validation_fraction = {self.validation_fraction}"
            )

    @cached_property
    def _lengths(self) -> Tensor:
        """The tokens of each pair's answers, with what is before them, [pairs, 2]."""
        ends = self.dataset.document_ends
        return torch.diff(ends, prepend=ends.new_zeros(1)).view(-1, 2)

    @cached_property
    def _usable(self) -> Tensor:
        return (self._lengths.amax(-1) <= self.sequence_length).nonzero().flatten()

    def _total(self) -> int:
        return len(self._usable)

    def _example(self, window: int) -> Batch:
        """Return a pair, `[2, sequence_length]`: the chosen answer, then the rejected one."""
        pair, S, mask = int(self._usable[window]), self.sequence_length, self.dataset.loss_mask
        assert mask is not None, "answers are a part of what is written"
        counts = self._lengths[pair].tolist()
        start = int(self.dataset.document_ends[2 * pair]) - counts[0]
        ids = torch.zeros(2, S, dtype=torch.int64, device="cpu")
        labels = torch.full_like(ids, IGNORE_INDEX)
        for row, count in enumerate(counts):
            ids[row, :count] = self.dataset.file.read(start, count)
            scored = mask.read(start, count) != 0
            labels[row, :count] = torch.where(scored, ids[row, :count], IGNORE_INDEX)
            start += count
        return Batch(ids, labels)
