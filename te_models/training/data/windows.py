"""The order in which training reads a data set, and what a batch of it is.

Training reads *windows* of `sequence_length` tokens: consecutive ones that do not overlap, or rows of whole documents
(`DocumentPacking.whole`). Labels are shifted inside the model, so a window holds sequence_length - 1 predictions. The
last `validation_fraction` of the windows is the validation split, a contiguous tail, so that no training text is a
neighbour of validation text except at one point.

The order is a pure function of (seed, position): position p of training is window `permutation(seed, epoch)[p % n]`
of epoch `p // n`. So the whole state of the data loader is one integer, and resuming, or changing the number of ranks
while keeping the global batch, continues the same sequence. Alternatives rejected: a stateful iterator (its state
must be saved and can disagree with the step), sampling with replacement (an epoch is not an epoch).

B batch, S sequence.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.cross_entropy import IGNORE_INDEX

from ...sizes import plural
from ..seeding import derive_seed
from .dataset import TokenDataset
from .errors import DataError

OPEN_ROWS = 32
"""Rows of whole documents that are filled at the same time."""
PADDING = -1
"""The document number of tokens that fill up a row."""


@dataclass(frozen=True)
class DocumentPacking:
    """What a window says of the documents in it. whole: windows are rows of whole documents, which implies the others.
    The others have Megatron's names: positions begin at 0 in each document; attention stays within a document; the
    first token of a document, predicted from the one before, is not scored."""

    whole: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @property
    def by_document(self) -> bool:
        """Whether it matters where documents begin."""
        return self.whole or self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class Batch(NamedTuple):
    """What the loss of a micro-batch is computed from, int64 [B, S] each. labels: -100 where a token is not scored;
    None: the input ids. position_ids: None: counting on in each row. documents: a number for each document of a row,
    within which attention stays, -1 for padding; None: each row is one."""

    input_ids: Tensor
    labels: Tensor | None = None
    position_ids: Tensor | None = None
    documents: Tensor | None = None

    @property
    def scored_labels(self) -> Tensor:
        """The labels, or the input ids."""
        return self.input_ids if self.labels is None else self.labels

    @property
    def places(self) -> dict[str, Tensor | None]:
        """Where tokens are, as a model takes it."""
        return {"position_ids": self.position_ids, "document_ids": self.documents}

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return Batch(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Return batches one after the other as one."""
        columns: list[Any] = [None if c[0] is None else torch.cat(c) for c in zip(*batches, strict=True)]
        return cls(*columns)

    def scored(self) -> int:
        """Return how many predictions the loss counts: the label of a row's first token has no prediction."""
        B, S = self.input_ids.shape
        return B * (S - 1) if self.labels is None else int((self.labels[:, 1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Windows:
    """One split of a data set, as a sequence of windows addressed by position.

    Args:
        split: "train" repeats for ever, in a shuffled order that is new in each epoch; "validation" is read once, in
            file order; "all" is the whole data set, read as "validation" is.
        labelled: Whether batches have labels, also where every token is scored.

    Raises DataError if the data set has no window of sequence_length tokens in the split.
    """

    dataset: TokenDataset
    sequence_length: int
    split: Literal["train", "validation", "all"]
    validation_fraction: float
    seed: int
    packing: DocumentPacking = DocumentPacking()
    labelled: bool = False

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise DataError(
                f"{self.dataset.path} has {plural(len(self.dataset), 'token')}: not one {self.split} window of "
                f"{plural(self.sequence_length, 'token')} with validation_fraction = {self.validation_fraction}"
            )

    @cached_property
    def _rows(self) -> DocumentRows:
        return pack_documents(self.dataset.document_ends, self.sequence_length)

    def _total(self) -> int:
        return len(self._rows) if self.packing.whole else len(self.dataset) // self.sequence_length

    @property
    def _sizes(self) -> tuple[int, int]:
        total = self._total()
        if self.split == "all":
            return 0, total
        validation = int(total * self.validation_fraction)
        if self.validation_fraction > 0 and total > 1:
            validation = max(1, validation)
        return total - validation, validation

    def __len__(self) -> int:
        """The number of windows in one epoch of this split."""
        train, validation = self._sizes
        return train if self.split == "train" else validation

    def window(self, position: int) -> int:
        """Return which window of the data set is read at `position`."""
        if self.split != "train":
            return self._sizes[0] + position
        epoch, index = divmod(position, len(self))
        return int(_permutation(len(self), derive_seed(self.seed, "data order", epoch))[index])

    def batch(self, position: int, size: int) -> Tensor:
        """Return the token ids of windows `position` to `position + size - 1`, int64 `[size, sequence_length]`."""
        return self.examples(position, size).input_ids

    def examples(self, position: int, size: int) -> Batch:
        """Return windows `position` to `position + size - 1` with all that the loss needs."""
        return Batch.joined([self._example(self.window(p)) for p in range(position, position + size)])

    def _example(self, window: int) -> Batch:
        """Return one window, `[1, sequence_length]` each."""
        S, file, mask = self.sequence_length, self.dataset.file, self.dataset.loss_mask
        if self.packing.whole:
            spans = self._rows.spans(window)
            ids = torch.cat([file.read(start, count) for start, count in spans])
            scored = None if mask is None else torch.cat([mask.read(start, count) for start, count in spans])
            sizes = [count for _, count in spans]
        else:
            start = window * S
            ids, scored = file.read(start, S), None if mask is None else mask.read(start, S)
            sizes = self._sizes_within(start) if self.packing.by_document else [S]
        if not self.packing.by_document and scored is None and not self.labelled:
            return Batch(ids[None])
        real, padding, packing = len(ids), S - len(ids), self.packing
        labels = ids.clone() if scored is None else ids.masked_fill(scored == 0, IGNORE_INDEX)
        if packing.whole or packing.eod_mask_loss:
            labels[torch.tensor([0, *sizes[:-1]], device=labels.device).cumsum(0)] = IGNORE_INDEX
        if padding:
            ids, labels = _filled(ids, padding, 0), _filled(labels, padding, IGNORE_INDEX)
            sizes = [*sizes, padding]
        counts = torch.tensor(sizes, device=ids.device)
        number, offset = (torch.arange(n, device=ids.device) for n in (len(sizes), S))
        number = number.repeat_interleave(counts)
        begins = (counts.cumsum(0) - counts)[number]
        number[real:] = PADDING
        return Batch(
            ids[None],
            labels[None],
            (offset - begins)[None] if packing.whole or packing.reset_position_ids else None,
            number[None] if packing.whole or packing.reset_attention_mask else None,
        )

    def _sizes_within(self, start: int) -> list[int]:
        """Return the sizes of the documents, or parts of them, in the tokens from `start` on."""
        S, ends = self.sequence_length, self.dataset.document_ends
        within = torch.tensor([start, start + S - 1], device=ends.device)
        first, last = torch.searchsorted(ends, within, right=True).tolist()
        cuts = [start, *dict.fromkeys(ends[first:last].tolist()), start + S]
        return [b - a for a, b in itertools.pairwise(cuts) if b > a]


def labelled_alike(parts: Sequence[Windows]) -> tuple[Windows, ...]:
    """Return windows of data sets that are read together: of text and of chats, all have labels, so that batches are
    alike on all ranks and in all steps."""
    mixed = len({part.dataset.loss_mask is None for part in parts}) > 1
    return tuple(replace(part, labelled=True) for part in parts) if mixed else tuple(parts)


@dataclass(frozen=True)
class DocumentRows:
    """Rows of whole documents: row i has the spans `begins[i]` to `begins[i + 1] - 1`."""

    begins: list[int]
    starts: list[int]
    counts: list[int]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of what a row holds."""
        own = slice(self.begins[row], self.begins[row + 1])
        return list(zip(self.starts[own], self.counts[own], strict=True))


def pack_documents(ends: Tensor, length: int) -> DocumentRows:
    """Pack documents into rows of at most `length` tokens. ends: int64 [documents].

    Each goes, in their order, to the fullest of `OPEN_ROWS` rows that has room for it (best fit). A document that is
    longer than a row is cut into several. Rows are numbered as they are opened, so that neighbours stay neighbours.
    """
    rows: list[list[tuple[int, int]]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    start = 0
    for end in ends.tolist():
        while start < end:
            count = min(end - start, length)
            found = bisect.bisect_left(open_rows, (count, -1))
            if found == len(open_rows):
                rows.append([])
                room, row = length, len(rows) - 1
                if len(open_rows) == OPEN_ROWS:
                    open_rows.pop(0)  # the fullest
            else:
                room, row = open_rows.pop(found)
            rows[row].append((start, count))
            if room > count:
                bisect.insort(open_rows, (room - count, row))
            start += count
    begins = [0]
    for spans in rows:
        begins.append(begins[-1] + len(spans))
    spans = [span for row in rows for span in row]
    return DocumentRows(begins, [start for start, _ in spans], [count for _, count in spans])


def _filled(row: Tensor, count: int, value: int) -> Tensor:
    return torch.cat([row, row.new_full((count,), value)])


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int) -> Tensor:
    """A batch straddles at most two epochs of each of the data sets that it is mixed of."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu")
