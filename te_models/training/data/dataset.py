"""A token data set on the disk.

A data set is a directory written by `te_models.training.data.writer`:
    tokens.bin     token ids, little endian, uint16 (vocabulary up to 65536) or uint32, documents one after another
    documents.bin  int64: the number of tokens up to the end of each document (absent from earlier data sets)
    loss_mask.bin  uint8: 1 where the loss counts a token (absent where it counts all)
    meta.json      format, version, dtype, num_tokens, num_documents, vocab_size, largest_token_id (absent from earlier
                   data sets), source, digests (`data_digest`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .digest import data_digest
from .errors import DataError
from .token_file import DTYPES, TokenFile

FORMAT = "te_models tokens"
TOKENS, DOCUMENTS, LOSS_MASK = "tokens.bin", "documents.bin", "loss_mask.bin"


@dataclass(frozen=True)
class TokenDataset:
    """An open data set. Tokens are read when a window is read. digest: the digest in meta.json, or None. loss_mask: the
    file of marks, None: the loss counts all tokens; documents: the file of ends, None: an earlier data set;
    extra_digests: the digests of the two in meta.json; largest: the largest id, None: an earlier data set."""

    path: Path
    file: TokenFile
    vocab_size: int
    num_documents: int
    digest: str | None = None
    documents: TokenFile | None = None
    loss_mask: TokenFile | None = None
    extra_digests: tuple[str, ...] = ()
    largest: int | None = None

    @classmethod
    def open(cls, path: str | Path) -> TokenDataset:
        """Open a data set. Raises DataError if it is missing or its size disagrees with its meta.json."""
        path = Path(path)
        meta = read_meta(path)
        file = TokenFile(path / TOKENS, meta["dtype"], meta["num_tokens"], meta["vocab_size"])
        digests = {name: meta[key] for name in (DOCUMENTS, LOSS_MASK) if (key := _digest_key(name)) in meta}
        extra = {name: side_file(path, name, meta) for name in digests}
        return cls(
            path,
            file,
            meta["vocab_size"],
            meta["num_documents"],
            meta.get("digest"),
            extra.get(DOCUMENTS),
            extra.get(LOSS_MASK),
            tuple(digests.values()),
            meta.get("largest_token_id"),
        )

    @cached_property
    def document_ends(self) -> torch.Tensor:
        """The number of tokens up to the end of each document, int64 `[number of documents]`.

        Raises DataError for a data set of an earlier release (it has none), and for ends that do not grow up to the
        number of tokens."""
        if self.documents is None:
            raise DataError(f"{self.path} has no {DOCUMENTS}: it was built by an earlier release; build it again")
        ends = self.documents.read(0, self.num_documents)
        if int(ends[-1]) != len(self) or bool((ends.diff(prepend=ends.new_zeros(1)) < 0).any()):
            raise DataError(f"{self.documents.path} is damaged: the ends of documents do not grow up to {len(self)}")
        return ends

    def largest_id(self) -> int:
        """Return the largest id that occurs; of an earlier data set, because it does not say, all tokens are read."""
        if self.largest is not None:
            return self.largest
        step = 1 << 22
        return max(int(self.file.read(i, min(step, len(self) - i)).max()) for i in range(0, len(self), step))

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
        extra = [side for side in (self.documents, self.loss_mask) if side is not None]
        for side, expected in zip(extra, self.extra_digests, strict=True):
            if data_digest(side) != expected:
                raise DataError(f"{side.path} is not what was built: its digest is not the one in meta.json")
        if self.loss_mask is not None:  # the same tokens, of which others are scored, are other data
            return hashlib.sha256(" ".join((found, *self.extra_digests)).encode()).hexdigest()
        return found

    def __len__(self) -> int:
        return self.file.count


def check_vocabulary(dataset: TokenDataset, vocab_size: int) -> None:
    """Raise DataError for a data set with a token that the model, whose vocabulary has `vocab_size`, does not have. A
    tokenizer may know more tokens than that."""
    if dataset.vocab_size > vocab_size:
        check_ids([dataset.largest_id()], str(dataset.path), vocab_size)


def check_ids(ids: Sequence[int], where: str, vocab_size: int) -> None:
    """Raise DataError for ids, of what `where` names, that a model does not have."""
    if ids and max(ids) >= vocab_size:
        raise DataError(
            f"{where} has the token id {max(ids)}; allowed: below {vocab_size}, the size of the model's vocabulary"
        )


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
    largest = meta.get("largest_token_id", 0)
    if type(largest) is not int or not 0 <= largest < meta["vocab_size"]:
        raise DataError(f"{file}: largest_token_id is {largest!r}; allowed: 0 to {meta['vocab_size'] - 1}")
    if meta.get("dtype") not in DTYPES:
        raise DataError(f"{file}: dtype is {meta.get('dtype')!r}; allowed: {', '.join(DTYPES)}")
    for key in ("digest", _digest_key(DOCUMENTS), _digest_key(LOSS_MASK)):
        if not isinstance(meta.get(key, ""), str):
            raise DataError(f"{file}: {key} is {meta[key]!r}; it must be a string")
    return meta


def side_file(folder: Path, name: str, meta: dict[str, Any]) -> TokenFile:
    """Open documents.bin or loss_mask.bin of a data set."""
    if name == DOCUMENTS:
        return TokenFile(folder / name, "int64", meta["num_documents"], meta["num_tokens"] + 1)
    return TokenFile(folder / name, "uint8", meta["num_tokens"], 2)


def _digest_key(name: str) -> str:
    return f"{Path(name).stem}_digest"
