"""One part of a data set that is being tokenized: it goes on behind the last row that was noted.

A part is written into the folder `NUMBER.partial`. Every `SAVE_SECONDS` its files are flushed, and `progress.json`
notes the span and the rows of it that are done, with the sizes of the files. A run that was killed cuts the files to
these sizes, passes over that many rows and goes on with the next one: no row is twice in a data set and none is left
out, also of a data set whose only shard has millions of rows.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from te_models.checkpoints.io.atomic import flush, replace_text

from .dataset import check_ids
from .documents import DocumentSpan, documents_behind
from .encoder import Encoder, Piece
from .formats import Document, Fields, RowError
from .writer import TokenWriter

NOTES = "notes.json"
"""Of a part: what is said of it at the end."""
NAMED = 5
"""Rows that were passed over of which meta.json has the sentence."""
SAVE_SECONDS = 10.0
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Work:
    """What is done to each document. load: makes a worker's encoder."""

    fields: Fields
    skip_bad_rows: bool
    model_vocab_size: int | None
    load: Callable[[], Encoder]


@dataclass(frozen=True)
class _Progress:
    """What is done of a part: all spans before `span`, and `rows` rows of it. place: of the writer."""

    span: int = 0
    rows: int = 0
    place: tuple[int, int, int] | None = None
    skipped_rows: int = 0
    first_skipped: tuple[str, ...] = ()
    unended: int = 0

    @classmethod
    def read(cls, folder: Path) -> _Progress:
        file = folder / _PROGRESS
        if not file.is_file():
            return cls()
        noted = json.loads(file.read_text(encoding="utf-8"))
        return cls(**noted | {name: tuple(noted[name]) for name in ("place", "first_skipped")})

    def after(self, skipped: list[str]) -> _Progress:
        """Return this with rows that were passed over since, of which the list is emptied."""
        named = (*self.first_skipped, *skipped)[:NAMED]
        found = replace(self, skipped_rows=self.skipped_rows + len(skipped), first_skipped=named)
        skipped.clear()
        return found


class _StoppedError(Exception):
    """Another worker failed."""


def has_begun(working: Path) -> bool:
    """Whether a folder of parts has one that goes on within a span."""
    return any(working.glob(f"*.partial/{_PROGRESS}"))


def write_part(folder: Path, spans: list[DocumentSpan], work: Work, encoder: Encoder, stop: threading.Event) -> None:
    """Write a part, or the rest of one that was interrupted, and give it its name. stop: ends this at the next
    document."""
    unfinished = folder.with_name(f"{folder.name}.partial")
    done = _Progress.read(unfinished)
    if done.place is None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    skipped: list[str] = []
    saved = time.monotonic()
    with TokenWriter(unfinished, encoder.vocab_size, masked=work.fields.is_chat, behind=done.place) as writer:
        for number, span in enumerate(spans[done.span :], done.span):
            first = done.rows if number == done.span else 0
            for rows, document in documents_behind(span, work.fields, skipped if work.skip_bad_rows else None, first):
                if stop.is_set():
                    raise _StoppedError
                try:
                    for pieces, count in encoder.documents(document):
                        _write_document(writer, document, pieces, work.model_vocab_size)
                        done = replace(done, unended=done.unended + count)
                except RowError as error:
                    if not work.skip_bad_rows:
                        raise
                    skipped.append(str(error))
                if time.monotonic() - saved >= SAVE_SECONDS:
                    done = replace(done.after(skipped), span=number, rows=rows, place=writer.place())
                    replace_text(unfinished / _PROGRESS, json.dumps(asdict(done)))
                    saved = time.monotonic()
    done = done.after(skipped)
    notes = {"skipped_rows": done.skipped_rows, "first_skipped": done.first_skipped, "unended": done.unended}
    (unfinished / NOTES).write_text(json.dumps(notes), encoding="utf-8")
    (unfinished / _PROGRESS).unlink(missing_ok=True)
    for path in unfinished.iterdir():
        flush(path)
    flush(unfinished)
    unfinished.rename(folder)


def _write_document(writer: TokenWriter, document: Document, pieces: Iterator[Piece], most: int | None) -> None:
    for ids, scored in pieces:
        if most is not None:
            check_ids(ids, document.where, most)
        writer.add(ids, scored)
    writer.end_document()
