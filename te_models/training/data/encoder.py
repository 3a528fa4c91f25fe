"""From documents to token ids, and of a chat to what the loss counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...tokenizer import FILE, ChatTokenizer, TokenizerError, end_token, read_tokenizer
from .documents import Document
from .token_file import DataError

Chat = Callable[[list[dict[str, str]]], tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Encoder:
    """Turns text into token ids. `eos` ends each document; None puts nothing between documents. chat: turns messages
    into ids and, for each, 1 where the loss counts it; None: there is no chat template."""

    name: str
    encode: Callable[[str], Sequence[int]]
    vocab_size: int
    eos: int | None
    chat: Chat | None = None

    def pieces(self, document: Document) -> Iterator[tuple[Sequence[int], Sequence[int] | None]]:
        """Yield the ids of a document piece by piece, and what of them is scored (None: all). Raises DataError, with
        file and line, for messages that the chat template refuses."""
        if document.messages is not None:
            assert self.chat is not None, "load_encoder"
            try:
                yield self.chat(document.messages)
            except TokenizerError as error:
                raise DataError(f"{document.where}: {error}") from None
            return
        for text in document.pieces:
            yield self.encode(text), None
        if self.eos is not None:
            yield [self.eos], None


def bytes_encoder() -> Encoder:
    """One token per UTF-8 byte, and 256 at the end of a document: needs no tokenizer files."""
    return Encoder("bytes", lambda text: text.encode("utf-8", "replace"), 257, 256)


def load_encoder(tokenizer: str, *, chat: bool = False) -> Encoder:
    """Return the encoder for "bytes" or for a folder with a Hugging Face tokenizer.json (extra `hf`).

    Special tokens are not added inside documents; the document end is the `eos_token` of tokenizer_config.json. chat:
    messages are to be encoded, with the folder's chat template, which writes all special tokens itself. Raises
    DataError for a folder without one.
    """
    if tokenizer == "bytes":
        if chat:
            raise DataError("the tokenizer 'bytes' has no chat template; allowed for messages: a tokenizer folder")
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
    size = model.vocab_size
    if chat:
        model.close()
        return Encoder(tokenizer, lambda text: (), size, None, ChatTokenizer(folder).encode)
    return Encoder(tokenizer, lambda text: model.encode(text, add_special_tokens=False), size, eos_id)
