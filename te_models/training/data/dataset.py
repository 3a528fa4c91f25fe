"""A token data set on the disk and the order in which training reads it.

Layout of a data set, a directory written by `te_models.training.data.build`:
    tokens.bin   token ids, little endian, uint16 (vocabulary up to 65536) or uint32, documents one after another
    meta.json    format, version, dtype, num_tokens, num_documents, vocab_size, source, digest (`data_digest`)

Training reads *windows*: `sequence_length` consecutive tokens, not overlapping; labels are shifted inside the model,
so a window holds sequence_length - 1 predictions. The last `validation_fraction` of the windows is the validation
split, a contiguous tail, so that no training text is a neighbour of validation text except at one point.

The order is a pure function of (seed, position): position p of training is window `permutation(seed, epoch)[p % n]`
of epoch `p // n`. So the whole state of the data loader is one integer, and resuming, or changing the number of ranks
while keeping the global batch, continues the same sequence. Alternatives rejected: a stateful iterator (its state
must be saved and can disagree with the step), sampling with replacement (an epoch is not an epoch).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from ..seeding import derive_seed
from .digest import data_digest
from .token_file import DTYPES, DataError, TokenFile

FORMAT = "te_models tokens"


@dataclass(frozen=True)
class TokenDataset:
    """An open data set. Tokens are read when a window is read. digest: the digest in meta.json, or None."""

    path: Path
    file: TokenFile
    vocab_size: int
    num_documents: int
    digest: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> TokenDataset:
        """Open a data set. Raises DataError if it is missing or its size disagrees with its meta.json."""
        path = Path(path)
        meta = read_meta(path)
        file = TokenFile(path / "tokens.bin", meta["dtype"], meta["num_tokens"], meta["vocab_size"])
        return cls(path, file, meta["vocab_size"], meta["num_documents"], meta.get("digest"))

    @property
    def tokens(self) -> torch.Tensor:
        """All token ids, int64 `[number of tokens]`, read into memory."""
        return self.file.read(0, len(self))

    def checked_digest(self) -> str:
        """Return the digest of the tokens. Raises DataError where it is not the one in meta.json, or an id in what the
        digest covers is beyond the vocabulary."""
        found = data_digest(self.file)
        if self.digest not in (None, found):
            raise DataError(f"{self.file.path} is not what was built: its digest is not the one in meta.json")
        return found

    def __len__(self) -> int:
        return self.file.count


def read_meta(path: Path) -> dict[str, Any]:
    """Return the checked meta.json of a data set."""
    file = path / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} is not a token data set: cannot read {file.name} ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != 1:
        raise DataError(f"{file} does not describe a token data set of version 1")
    for name in ("num_tokens", "num_documents", "vocab_size"):
        if type(meta.get(name)) is not int or meta[name] <= 0:
            raise DataError(f"{file}: {name} is {meta.get(name)!r}; it must be a positive integer")
    if meta.get("dtype") not in DTYPES:
        raise DataError(f"{file}: dtype is {meta.get('dtype')!r}; allowed: {', '.join(DTYPES)}")
    if not isinstance(meta.get("digest", ""), str):
        raise DataError(f"{file}: digest is {meta['digest']!r}; it must be a string")
    return meta


@dataclass(frozen=True)
class Windows:
    """One split of a data set, as a sequence of windows addressed by position.

    Args:
        split: "train" repeats for ever, in a shuffled order that is new in each epoch; "validation" is read once, in
            file order.

    Raises DataError if the data set has no window of sequence_length tokens in the split.
    """

    dataset: TokenDataset
    sequence_length: int
    split: Literal["train", "validation"]
    validation_fraction: float
    seed: int

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise DataError(
                f"{self.dataset.path} has {len(self.dataset)} tokens: not one {self.split} window of "
                f"{self.sequence_length} tokens with validation_fraction = {self.validation_fraction}"
            )

    @property
    def _sizes(self) -> tuple[int, int]:
        total = len(self.dataset) // self.sequence_length
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
        if self.split == "validation":
            return self._sizes[0] + position
        epoch, index = divmod(position, len(self))
        return int(_permutation(len(self), derive_seed(self.seed, "data order", epoch))[index])

    def batch(self, position: int, size: int) -> torch.Tensor:
        """Return windows `position` to `position + size - 1` as int64 `[size, sequence_length]`."""
        S = self.sequence_length
        starts = [self.window(p) * S for p in range(position, position + size)]
        return torch.stack([self.dataset.file.read(start, S) for start in starts])


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int) -> torch.Tensor:
    """A batch straddles at most two epochs (or reads one small data set repeatedly), hence two entries."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
