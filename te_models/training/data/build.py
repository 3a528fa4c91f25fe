"""Build a token data set from documents, streaming: memory stays bounded by one piece of text, whatever the corpus.

The directory appears complete or not at all. Files are read in a shuffled order (a fixed seed), so that the validation
split, the tail of the data set, is a fair sample of them.
"""

from __future__ import annotations

import glob
import json
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from te_models.checkpoints.io.atomic import new_folder

from ...tokenizer import FILE, end_token, read_tokenizer
from .dataset import FORMAT, TokenDataset
from .digest import data_digest
from .token_file import DataError, TokenFile

PIECE = 1 << 20  # characters tokenized at once; a piece ends at a line end
_TYPECODES = {"uint16": "H", "uint32": "I"}


@dataclass(frozen=True)
class Encoder:
    """Turns text into token ids. `eos` ends each document; None puts nothing between documents."""

    name: str
    encode: Callable[[str], Sequence[int]]
    vocab_size: int
    eos: int | None


def bytes_encoder() -> Encoder:
    """One token per UTF-8 byte, and 256 at the end of a document: needs no tokenizer files."""
    return Encoder("bytes", lambda text: text.encode("utf-8"), 257, 256)


def load_encoder(tokenizer: str) -> Encoder:
    """Return the encoder for "bytes" or for a folder with a Hugging Face tokenizer.json (extra `hf`).

    Special tokens are not added inside documents; the document end is the `eos_token` of tokenizer_config.json.
    """
    if tokenizer == "bytes":
        return bytes_encoder()
    folder = Path(tokenizer)
    if not (folder / FILE).is_file():
        raise DataError(f"the tokenizer folder {folder} has no {FILE}")
    model = read_tokenizer(folder, "tokenizing text")
    eos = end_token(folder)
    eos_id = None if eos is None else model.token_to_id(eos)
    if eos is not None and eos_id is None:
        raise DataError(
            f"{folder}/tokenizer_config.json names the eos_token {eos!r}, which tokenizer.json does not have"
        )
    return Encoder(tokenizer, lambda text: model.encode(text, add_special_tokens=False), model.vocab_size, eos_id)


def build_dataset(
    out: str | Path, text: Sequence[str | Path], tokenizer: str, *, shuffle_seed: int = 0
) -> TokenDataset:
    """Tokenize text files into a new data set at `out`.

    Args:
        text: File names or glob patterns (`**` included). Bytes that are not UTF-8 become U+FFFD.
        tokenizer: A folder with tokenizer.json, or "bytes".
        shuffle_seed: Decides the order of the files.

    Raises:
        DataError: nothing matches, `out` exists, or the tokenizer folder is incomplete.
        TokenizerError, CheckpointError: the tokenizer's files are damaged, ask for too much, or leave the folder.
    """
    encoder = load_encoder(tokenizer)
    files = matching_files(text)
    random.Random(shuffle_seed).shuffle(files)
    source = {"text": [str(t) for t in text], "tokenizer": tokenizer, "files": len(files), "shuffle_seed": shuffle_seed}
    return write_dataset(out, (_tokens_of(file, encoder) for file in files), encoder.vocab_size, source=source)


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
    if vocab_size <= 0 or vocab_size > 2**32:
        raise DataError(f"vocab_size is {vocab_size}; allowed: 1 to 2**32")
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    num_tokens = num_documents = 0
    with new_folder(out, overwrite=False) as folder:
        with (folder / "tokens.bin").open("wb") as file:
            for document in documents:
                num_documents += 1
                for piece in document:
                    file.write(_packed(piece, vocab_size, dtype))
                    num_tokens += len(piece)
        if num_tokens == 0:
            raise DataError(f"nothing to write to {out}: the documents hold no token")
        tokens = TokenFile(folder / "tokens.bin", dtype, num_tokens, vocab_size)
        meta = {
            "format": FORMAT,
            "version": 1,
            "dtype": dtype,
            "num_tokens": num_tokens,
            "num_documents": num_documents,
            "vocab_size": vocab_size,
            "source": source,
            "digest": data_digest(tokens),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return TokenDataset.open(out)


def _packed(piece: Sequence[int], vocab_size: int, dtype: str) -> bytes:
    if len(piece) and (max(piece) >= vocab_size or min(piece) < 0):
        raise DataError(f"token id {max(piece)} or {min(piece)} is outside the vocabulary of {vocab_size}")
    numbers = array(_TYPECODES[dtype])
    numbers.extend(piece)  # not array(code, piece): that reinterprets the memory of a bytes object
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def matching_files(text: Sequence[str | Path]) -> list[Path]:
    """Return the files that file names and glob patterns mean, sorted. Raises DataError for one that means none."""
    found: set[Path] = set()
    for pattern in text:
        matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]  # noqa: PTH207 (absolute patterns)
        files = [file for file in matches if file.is_file()]
        if not files:
            raise DataError(f"no text file matches {str(pattern)!r}")
        found.update(files)
    return sorted(found)


def _tokens_of(file: Path, encoder: Encoder) -> Iterator[Sequence[int]]:
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        while piece := lines.readlines(PIECE):
            yield encoder.encode("".join(piece))
    if encoder.eos is not None:
        yield [encoder.eos]
