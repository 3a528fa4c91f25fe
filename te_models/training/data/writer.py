"""Writing a token data set, document after document: the directory appears complete or not at all, and memory stays
bounded by one piece of a document. `dataset` describes the files."""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from te_models.checkpoints.io.atomic import new_folder

from .dataset import DOCUMENTS, FORMAT, LOSS_MASK, TOKENS, TokenDataset, side_file
from .digest import data_digest
from .errors import DataError
from .token_file import TokenFile

TYPECODES = {"uint16": "H", "uint32": "I"}


def dtype_for(vocab_size: int) -> str:
    """Return the dtype that holds the ids of a vocabulary. Raises DataError for an impossible size."""
    if vocab_size <= 0 or vocab_size > 2**32:
        raise DataError(f"vocab_size is {vocab_size}; allowed: 1 to 2**32")
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenWriter:
    """Writes tokens.bin, documents.bin and, with `masked`, loss_mask.bin into a folder; to be used in a `with`.

    behind: what `place` of an earlier writer said; this one goes on there, and cuts off what the earlier one wrote
    after that."""

    def __init__(
        self, folder: Path, vocab_size: int, *, masked: bool, behind: tuple[int, int, int] | None = None
    ) -> None:
        self.vocab_size, self.dtype = vocab_size, dtype_for(vocab_size)
        self.num_tokens, self.num_documents, self.largest = behind or (0, 0, -1)  # largest: of the ids
        token_bytes = self.num_tokens * array(TYPECODES[self.dtype]).itemsize
        self._tokens = _opened(folder / TOKENS, token_bytes)
        self._ends = _opened(folder / DOCUMENTS, 8 * self.num_documents)
        self._mask = _opened(folder / LOSS_MASK, self.num_tokens) if masked else None

    def place(self) -> tuple[int, int, int]:
        """Return where this writer is, all of which is on the disk: (tokens, documents, largest id)."""
        for file in (self._tokens, self._ends, self._mask):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return self.num_tokens, self.num_documents, self.largest

    def add(self, ids: Sequence[int], scored: Sequence[int] | None = None) -> None:
        """Write a piece of a document. scored: 1 for each token that the loss counts, 0 for the others."""
        self._tokens.write(stored_ids(ids, self.vocab_size, self.dtype))
        self.largest = max(self.largest, max(ids, default=-1))
        if self._mask is not None:
            self._mask.write(bytes([1] * len(ids) if scored is None else scored))
        self.num_tokens += len(ids)

    def end_document(self) -> None:
        """Note that a document ends here."""
        self._ends.write(self.num_tokens.to_bytes(8, "little"))
        self.num_documents += 1

    def append(self, folder: Path) -> None:
        """Append what another writer with the same arguments wrote into a folder."""
        files = [(TOKENS, self._tokens)] + ([] if self._mask is None else [(LOSS_MASK, self._mask)])
        for name, target in files:
            with (folder / name).open("rb") as file:
                while data := file.read(1 << 20):
                    target.write(data)
                    if name == TOKENS:
                        self.largest = max(self.largest, *_ids(data, self.dtype))
        ends = array("Q", (folder / DOCUMENTS).read_bytes())
        if sys.byteorder == "big":
            ends.byteswap()
        for end in ends:
            self._ends.write((self.num_tokens + end).to_bytes(8, "little"))
        self.num_documents += len(ends)
        self.num_tokens += (folder / TOKENS).stat().st_size // array(TYPECODES[self.dtype]).itemsize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._ends, self._mask):
            if file is not None:
                file.close()


def _opened(path: Path, size: int) -> BinaryIO:
    """Open a file behind its first `size` bytes. Raises DataError for one that has fewer."""
    if size and path.stat().st_size < size:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes, and {size} were written; remove the folder {path.parent}"
        )
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file


def _ids(data: bytes, dtype: str) -> array[int]:
    ids = array(TYPECODES[dtype], data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def stored_ids(piece: Sequence[int], vocab_size: int, dtype: str) -> bytes:
    """Return ids as they are stored. Raises DataError for one outside the vocabulary."""
    if len(piece) and (max(piece) >= vocab_size or min(piece) < 0):
        raise DataError(f"token id {max(piece)} or {min(piece)} is outside the vocabulary of {vocab_size}")
    numbers = array(TYPECODES[dtype])
    numbers.extend(piece)  # not array(code, piece): that reinterprets the memory of a bytes object
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def write_meta(folder: Path, writer: TokenWriter, source: dict[str, Any] | None) -> None:
    """Write meta.json beside the finished files of a writer."""
    tokens = TokenFile(folder / TOKENS, writer.dtype, writer.num_tokens, writer.vocab_size)
    meta = {
        "format": FORMAT,
        "version": 1,
        "dtype": writer.dtype,
        "num_tokens": writer.num_tokens,
        "num_documents": writer.num_documents,
        "vocab_size": writer.vocab_size,
        "largest_token_id": writer.largest,
        "source": source,
        "digest": data_digest(tokens),
    }
    for name in (DOCUMENTS, LOSS_MASK):
        if (folder / name).exists():
            meta[f"{Path(name).stem}_digest"] = data_digest(side_file(folder, name, meta))
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def write_dataset(
    out: str | Path,
    documents: Iterable[Iterable[Sequence[int]]],
    vocab_size: int,
    *,
    source: dict[str, object] | None = None,
) -> TokenDataset:
    """Write documents, each an iterable of pieces (sequences of token ids), as a new data set at `out`.

    vocab_size: token ids are 0 to vocab_size - 1. source: recorded in meta.json. Raises DataError if `out` exists, if
    the documents hold no token, and for a token id outside the vocabulary.
    """
    out = Path(out)
    if out.exists():
        raise DataError(f"{out} exists already")
    dtype_for(vocab_size)
    with new_folder(out, overwrite=False) as folder:
        with TokenWriter(folder, vocab_size, masked=False) as writer:
            for document in documents:
                for piece in document:
                    writer.add(piece)
                writer.end_document()
        if writer.num_tokens == 0:
            raise DataError(f"nothing to write to {out}: the documents hold no token")
        write_meta(folder, writer, source)
    return TokenDataset.open(out)
