"""From documents to token ids, and of a chat to what the loss counts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from te_models.checkpoints import CheckpointError

from ...tokenizer import (
    ChatTokenizer,
    Tokenizer,
    TokenizerError,
    document_end,
    ends_of,
    read_tokenizer,
    tokenizer_folder,
)
from .errors import DataError
from .formats import Document, RowError
from .options import DocumentOptions

Piece = tuple[Sequence[int], Sequence[int] | None]
Rows = list[tuple[list[int], list[int], int]]
CHATS = ("messages", "sharegpt", "alpaca")
"""Formats whose every row needs a chat template."""


@dataclass(frozen=True)
class Encoder:
    """Turns documents into token ids. before and behind: ids around each document of text. following: encodes a piece
    of a text behind another one that ends with a line; None: as `encode` does. pair: turns a prompt and its answer into
    ids and, for each, 1 where the loss counts it. chat: turns messages and tools into rows of these, with how many
    answers of a row no token ends."""

    name: str
    encode: Callable[[str], Sequence[int]]
    vocab_size: int
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    following: Callable[[str], Sequence[int]] | None = None
    pair: Callable[[str, str], tuple[list[int], list[int]]] | None = None
    chat: Callable[[Document], Rows] | None = None

    def documents(self, document: Document) -> Iterator[tuple[Iterator[Piece], int]]:
        """Yield what a document is in a data set, of a chat one or more rows: ids piece by piece with what of them is
        scored (None: all), and how many answers no token ends. Raises RowError for messages that the chat template
        refuses. Of a preference pair both answers, or neither."""
        if document.rejected is not None:
            for answer in [self._answer(one) for one in (replace(document, rejected=None), document.rejected)]:
                yield iter(answer[0]), answer[1]
            return
        if document.messages is None:
            yield self._pieces(document), 0
            return
        if self.chat is None:
            raise DataError(
                f"the tokenizer {self.name!r} has no chat template; allowed for messages: a tokenizer folder"
            )
        for ids, scored, unended in self.chat(document):
            yield iter([(ids, scored)]), unended

    def _answer(self, document: Document) -> tuple[list[Piece], int]:
        """Return the one row of an answer."""
        rows = [(list(pieces), unended) for pieces, unended in self.documents(document)]
        if len(rows) != 1:
            raise RowError(
                f"{document.where}: the chat template writes an answer otherwise when the chat goes on; allowed in "
                "preference pairs: one answer behind the prompt"
            )
        return rows[0]

    def _pieces(self, document: Document) -> Iterator[Piece]:
        masked = document.scored is not None
        if self.before:
            yield self.before, [0] * len(self.before) if masked else None
        if masked:
            assert self.pair is not None
            prompt, answer = document.pieces
            yield self.pair(prompt, answer)
        else:
            encode = self.encode
            for text in document.pieces:
                yield encode(text), None
                encode = self.following or encode
        if self.behind:
            yield self.behind, None


def bytes_encoder(options: DocumentOptions | None = None) -> Encoder:
    """One token per UTF-8 byte, and 256 at the end of a document: needs no tokenizer files."""
    options = options or DocumentOptions()
    if options.add_bos_token is True:
        raise DataError("add_bos_token is true, and the tokenizer 'bytes' has no token that begins a text")
    if options.eos_token is not None:
        raise DataError("eos_token is given, and the tokenizer 'bytes' has one of its own, 256")

    def ids(text: str) -> bytes:
        return text.encode("utf-8", "replace")

    def pair(prompt: str, answer: str) -> tuple[list[int], list[int]]:
        before, after = ids(prompt), ids(answer)
        return [*before, *after], [0] * len(before) + [1] * len(after)

    return Encoder("bytes", ids, 257, (), () if options.add_eos_token is False else (256,), pair=pair)


def load_encoder(tokenizer: str, *, format: str = "text", options: DocumentOptions | None = None) -> Encoder:
    """Return the encoder for "bytes" or for a folder with a Hugging Face tokenizer.json (extra `hf`).

    A document has the tokens that transformers' tokenizer gives its text, those that it puts around a text included,
    and the token that ends a text behind them where it is not there yet. A chat has those that the folder's chat
    template writes. Raises DataError for a folder without tokenizer, or chat template where the format asks for one,
    and for special tokens that are asked for and not there, or would be missing between documents without a word.
    """
    options = options or DocumentOptions()
    if tokenizer == "bytes":
        if format in CHATS:
            raise DataError("the tokenizer 'bytes' has no chat template; allowed for messages: a tokenizer folder")
        return bytes_encoder(options)
    try:
        folder = tokenizer_folder(tokenizer)
    except (TokenizerError, CheckpointError) as error:
        raise DataError(str(error)) from None
    model = read_tokenizer(folder, "tokenizing text")
    end = _end(folder, model, options)
    chat = _Chats(folder, model, options, end)
    if format in CHATS:
        chat.open()  # a template that is not there, or cannot be read, is refused before rows are read
        return Encoder(tokenizer, lambda text: (), model.vocab_size, chat=chat)
    before, behind = _around(folder, model, options, end)

    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False)

    return Encoder(tokenizer, encode, model.vocab_size, before, behind, model.encode_following, model.encode_pair, chat)


class _Chats:
    """Chats through a folder's template, in a process that starts with the first one."""

    def __init__(self, folder: Path, model: Tokenizer, options: DocumentOptions, end: int | None) -> None:
        self._folder, self._options = folder, options
        self._ends = sorted({*ends_of(folder, model), *(() if end is None else (end,))})
        self._end = None
        if options.add_eos_token is True:
            self._end = options.eos_token or (None if end is None else model.decode([end]))
        self._template: ChatTokenizer | None = None

    def open(self) -> ChatTokenizer:
        if self._template is None:
            final = self._options.rewritten_chats == "final"
            template = ChatTokenizer(self._folder, ends=self._ends, end=self._end, final=final)
            template.turn_ends()
            self._template = template
        return self._template

    def __call__(self, document: Document) -> Rows:
        assert document.messages is not None
        template = self.open()
        try:
            return template.encode(document.messages, document.tools)
        except TokenizerError as error:
            kind = DataError if template.closed else RowError
            raise kind(f"{document.where}: {error}{_hint(document.messages)}") from None


def _hint(messages: list[dict[str, Any]]) -> str:
    parts = any(isinstance(message.get("content"), list) for message in messages)
    return "; data.join_parts = true (--join-parts) gives it parts of text as one text" if parts else ""


def _end(folder: Path, model: Tokenizer, options: DocumentOptions) -> int | None:
    """Return the id of the token that ends documents, or answers; None: the tokenizer has none."""
    if options.eos_token is None:
        return document_end(folder, model)
    found = model.token_to_id(options.eos_token)
    if found is None:
        raise DataError(f"eos_token is {options.eos_token!r}, which the tokenizer of {folder} does not have")
    return found


def _around(
    folder: Path, model: Tokenizer, options: DocumentOptions, end: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and behind each document of text."""
    before, behind = model.beside()
    if options.add_bos_token is True and model.bos not in before:
        if model.bos is None:
            raise DataError(f"add_bos_token is true, and {folder} names no token that begins a text (bos_token)")
        before = [model.bos, *before]
    if end is not None and end not in behind:
        behind = [*behind, end]
    if not behind and options.add_eos_token is not False:
        raise DataError(
            f"{folder} names no token that ends a text (eos_token), so that documents would run together; allowed: "
            'data.eos_token = "TOKEN" (--eos-token), or data.add_eos_token = false (--no-eos-token)'
        )
    return () if options.add_bos_token is False else tuple(before), () if options.add_eos_token is False else tuple(
        behind
    )
