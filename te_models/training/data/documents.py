"""Documents in files: text, JSON lines, Parquet, and data sets of Hugging Face `datasets`, one after another.

The name says what a file is: `.jsonl` and `.ndjson` are JSON lines, `.parquet` Parquet (extra `data`), a folder with a
state.json a saved data set (extra `data`), `hf://` a data set that is streamed (`streamed`, extra `data`), everything
else is text, one document a file. A *span* is a part of a file that is read in one go: whole text files, some 32 MiB of
JSON lines, a row group, some thousand rows, a shard of a stream.
"""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ...extras import MissingExtraError, require
from ...terminal import one_line
from . import streamed
from .errors import DataError, first_names
from .formats import Document, Fields, RowError

PIECE = 1 << 20
"""Characters of a text file that are read at once; a piece ends at a line end, before a line that begins with no space
unless there is none in as many characters again: tokenizers join spaces and line ends."""
SPAN_BYTES = 32 << 20
SPAN_ROWS = 4096
Kind = Literal["text", "jsonl", "json", "parquet", "dataset", "stream"]
MAX_JSON_BYTES = 1 << 30
"""Of a .json file of rows, because that is read at once."""
_MARK = b"\xef\xbb\xbf"
"""The byte order mark that some programs put before UTF-8."""
_IN_FOLDERS = "text, .jsonl, .ndjson, .json, .parquet and saved data sets"


@dataclass(frozen=True)
class DocumentSpan:
    """Bytes `begin` to `end` of JSON lines, of which the first is line `first`; or a whole text file; or rows `begin`
    to `end` of a saved data set; or row group `begin`, whose first row is `first`; or shard `begin` of a stream. size:
    how much work it is."""

    file: Path
    kind: Kind
    begin: int
    end: int
    first: int
    size: int


def matching_files(text: Sequence[str | Path]) -> list[Path]:
    """Return the files and saved data sets that names and glob patterns mean, sorted; a folder that is named is all
    that it holds. Raises DataError for a name that means none."""
    found: set[Path] = set()
    for pattern in text:
        if streamed.is_stream(str(pattern)):
            found.add(streamed.path_of(str(pattern)))
            continue
        if Path(pattern).is_dir() and not _is_saved(Path(pattern)):
            inside = _files_inside(Path(pattern))
            if not inside:
                raise DataError(f"the folder {pattern} holds no files; allowed in a folder: {_IN_FOLDERS}")
            found.update(inside)
            continue
        matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]  # noqa: PTH207 (absolute patterns)
        files = [file for file in matches if file.is_file() or _is_saved(file)]
        if not files:
            raise DataError(f"no text file matches {str(pattern)!r}")
        found.update(files)
    return sorted(found)


def file_kind(file: Path, fields: Fields) -> Kind:
    """Return what a file is, by its name; .json is text like any other, but where rows are wanted."""
    if streamed.is_stream(str(file)):
        return "stream"
    if file.suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if file.suffix == ".json" and fields.is_chat:
        return "json"
    return "dataset" if file.is_dir() else "parquet" if file.suffix == ".parquet" else "text"


def spans_of(file: Path, fields: Fields) -> list[DocumentSpan]:
    """Return the spans of a file. Raises DataError for one that cannot be read or lacks a field, and
    MissingExtraError without the extra that reads it."""
    kind = file_kind(file, fields)
    try:
        if kind == "text":
            if fields.is_chat:
                raise DataError(
                    f"{file} is text; allowed with a messages field or a format of rows: .jsonl, .json, .parquet and "
                    "saved data sets"
                )
            return [DocumentSpan(file, kind, 0, 0, 1, file.stat().st_size)]
        if kind == "json":
            return [DocumentSpan(file, kind, 0, 0, 1, file.stat().st_size)]
        if kind == "jsonl":
            return list(_line_spans(file))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    if kind == "stream":
        found = streamed.columns_of(str(file))
        fields.check_columns(streamed.name_of(str(file)), found)
        return [DocumentSpan(file, kind, i, i + 1, 1, 1) for i in range(streamed.shards_of(str(file)))]
    opened = _open_table(file, kind)
    fields.check_columns(str(file), opened.schema_arrow.names if kind == "parquet" else opened.column_names)
    if kind == "dataset":
        ends = [min(i + SPAN_ROWS, len(opened)) for i in range(0, len(opened), SPAN_ROWS)]
        return [DocumentSpan(file, kind, i * SPAN_ROWS, end, i * SPAN_ROWS + 1, end) for i, end in enumerate(ends)]
    groups, first = [opened.metadata.row_group(i) for i in range(opened.num_row_groups)], 1
    spans = []
    for i, group in enumerate(groups):
        spans.append(DocumentSpan(file, kind, i, i + 1, first, group.total_byte_size))
        first += group.num_rows
    return spans


def documents_of(span: DocumentSpan, fields: Fields, skipped: list[str] | None = None) -> Iterator[Document]:
    """Yield the documents of a span. A row that cannot be read, has not the field, has it in another type, or is empty
    (an empty text file is a document) is a RowError with file and line or row; or, where there is a list of `skipped`
    rows, a sentence more in it. Raises DataError for a file that cannot be read any further."""
    return (document for _, document in documents_behind(span, fields, skipped, 0))


def documents_behind(
    span: DocumentSpan, fields: Fields, skipped: list[str] | None, rows: int
) -> Iterator[tuple[int, Document]]:
    """Yield the documents of a span behind its first `rows` rows, as `documents_of` does, each with the number of rows
    up to its end: with this number the next call goes on. The first rows are read again and are otherwise passed over;
    a text file is one row."""
    if span.kind == "text":
        if not rows:
            yield 1, Document(str(span.file), _text_pieces(span.file))
        return
    for number, (where, row) in enumerate(islice(_rows(span, fields), rows, None), rows + 1):
        try:
            if isinstance(row, RowError):
                raise row
            document = fields.document(where, row)
        except RowError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
        else:
            yield number, document


def _rows(span: DocumentSpan, fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yield what errors call each row, and the row: its fields, or why it has none."""
    if span.kind == "jsonl":
        yield from _json_lines(span)
    elif span.kind == "json":
        yield from _json_rows(span.file)
    else:
        where = str(span.file)
        if span.kind == "stream":
            where = f"{streamed.name_of(where)}, shard {span.begin}"
        for number, row in _numbered(where, span.first, _table_rows(span, fields)):
            yield f"{where}, row {number}", row


def _is_saved(folder: Path) -> bool:
    return folder.is_dir() and (folder / "state.json").is_file()


def _files_inside(folder: Path) -> list[Path]:
    """Return the documents' files and the saved data sets in a folder and the folders inside it; names that begin with
    a dot are passed over. Raises DataError where one of these folders or files is something else."""
    splits = sorted(path.name for path in folder.iterdir() if _is_saved(path))
    if (folder / "dataset_dict.json").is_file() and splits:
        raise DataError(f"{folder} has the splits {first_names(splits)}; name one of them, as in {folder / splits[0]}")
    if (folder / "tokens.bin").is_file() and (folder / "meta.json").is_file():
        raise DataError(f"{folder} is a token data set already, for data.path; allowed in a folder: {_IN_FOLDERS}")
    found: list[Path] = []
    for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        if path.is_dir() and not path.is_symlink() and not _is_saved(path):  # a link might lead back to here
            found += _files_inside(path)
        elif path.is_file() or _is_saved(path):
            found.append(path)
    for file in (file for file in found if file_kind(file, Fields()) == "text"):
        with file.open("rb") as start:
            if b"\0" in start.read(1024):
                raise DataError(f"{file} is no text; allowed in a folder: {_IN_FOLDERS}, or name a pattern")
    return found


def _text_pieces(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            piece = lines.readlines(PIECE)
            while piece:
                more = lines.readlines(PIECE)
                cut = next((i for i, line in enumerate(more) if not line[0].isspace()), len(more))
                yield "".join([*piece, *more[:cut]])
                piece = more[cut:] or lines.readlines(PIECE)
    except UnicodeDecodeError:
        raise _undecodable(file) from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None


def _undecodable(file: Path) -> DataError:
    """Return the error that names the first line that is no UTF-8; no character's bytes hold a line end."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return DataError(
                    f"{file}, line {number} is not UTF-8: byte {error.start + 1} of it is {line[error.start]:#04x}; "
                    "allowed: text in UTF-8, so convert the file or leave it out of the pattern"
                )
    return DataError(f"{file} changed while it was read")


def _line_spans(file: Path) -> Iterator[DocumentSpan]:
    """Cut a file of lines where lines end."""
    begin, first, line, position = 0, 1, 0, 0
    with file.open("rb") as lines:
        for data in lines:
            line, position = line + 1, position + len(data)
            if position - begin >= SPAN_BYTES:
                yield DocumentSpan(file, "jsonl", begin, position, first, position - begin)
                begin, first = position, line + 1
    if position > begin:
        yield DocumentSpan(file, "jsonl", begin, position, first, position - begin)


def _json_lines(span: DocumentSpan) -> Iterator[tuple[str, Any]]:
    """The rows of JSON lines; a line without anything is no row."""
    with span.file.open("rb") as lines:
        lines.seek(span.begin)
        number, position = span.first, span.begin
        while position < span.end and (data := lines.readline()):
            text = data.removeprefix(_MARK) if position == 0 else data
            if text.strip():
                where = f"{span.file}, line {number}"
                yield where, _parsed(where, text)
            number, position = number + 1, position + len(data)


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .json file: a list of objects."""
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise DataError(f"{file} has {size} bytes, more than the {MAX_JSON_BYTES} allowed for .json; allowed: .jsonl")
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}; allowed: a list of rows, or lines of JSON in .jsonl") from None
    if not isinstance(rows, list):
        raise DataError(f"{file} holds a {type(rows).__name__}; allowed: a list of rows, or lines of JSON in .jsonl")
    for number, row in enumerate(rows, 1):
        where = f"{file}, row {number}"
        yield where, row if isinstance(row, dict) else _no_object(where, row)


def _parsed(where: str, data: bytes) -> dict[str, Any] | RowError:
    try:
        row = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return RowError(f"{where} is not JSON: {error}")
    return row if isinstance(row, dict) else _no_object(where, row)


def _no_object(where: str, row: Any) -> RowError:
    return RowError(f"{where} is a {type(row).__name__}; allowed: an object of named fields")


def _open_table(file: Path, kind: Kind) -> Any:
    library = require("pyarrow.parquet" if kind == "parquet" else "datasets", "data", feature=f"reading {file}")
    try:
        opened: Any = library.ParquetFile(file) if kind == "parquet" else library.load_from_disk(str(file))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{file} cannot be read: {one_line(error)}") from None
    if isinstance(opened, dict):
        raise DataError(
            f"{file} has the splits {first_names(opened)}; name one of them, as in {file / next(iter(opened))}"
        )
    return opened


def _table_rows(span: DocumentSpan, fields: Fields) -> Iterator[dict[str, Any]]:
    """The rows of a table, with the columns that are read."""
    if span.kind == "stream":
        yield from streamed.shard_rows(str(span.file), span.begin, list(fields.columns()))
        return
    opened = _open_table(span.file, span.kind)
    there = opened.schema_arrow.names if span.kind == "parquet" else opened.column_names
    columns = [name for name in fields.columns() if name in there]
    if span.kind == "parquet":
        for batch in opened.iter_batches(row_groups=[span.begin], columns=columns):
            values = [batch.column(i).to_pylist() for i in range(len(columns))]
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))
    else:
        found = opened.select_columns(columns)[span.begin : span.end]
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*(found[c] for c in columns), strict=True))


def _numbered(where: str, first: int, values: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Number values, and say which one was next where the library that reads them fails."""
    number = first
    try:
        for value in values:
            yield number, value
            number += 1
    except (DataError, MissingExtraError):
        raise
    except Exception as error:  # every format's library raises different errors
        says = one_line(error)[:300]
        raise DataError(f"{where}, row {number} or one soon after cannot be read: {says}") from None
