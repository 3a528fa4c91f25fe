"""Rows of a Hugging Face data set that is read as it comes, without a copy of it on disk (extra `data`).

`hf://NAME@CONFIGURATION:SPLIT` names one: of the hub, or a folder of files here; the configuration may be left out, and
the split is then `train`. Each of its shards, a file as a rule, is read by itself, and an interrupted run goes on
behind the last row of one that it noted (`part`).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ...extras import require
from ...terminal import one_line
from .errors import DataError

_NAME = re.compile(r"hf://(?P<name>[^@:]+)(@(?P<config>[^@:]+))?(:(?P<split>[^@:]+))?")
_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Readers of `datasets` that unpickle nothing. Others may: pandas' files are pickles, web data sets may hold some."""
_opened: dict[str, Any] = {}
"""By path: what `columns_of` opened last, because that asks the hub. Its shards are read from it."""
_versions: dict[str, list[Any]] = {}


def is_stream(text: str) -> bool:
    """Whether a name, or the path that stands for it, is that of a streamed data set."""
    return text.startswith("hf:/")


def path_of(name: str) -> Path:
    """Return the path that stands for a data set beside the paths of files; it has one slash."""
    return Path("hf:") / quote(name.removeprefix("hf://"), safe="")


def name_of(path: str) -> str:
    """Return the name that a path stands for."""
    return "hf://" + unquote(path.removeprefix("hf:/"))


def columns_of(path: str) -> list[str]:
    """Open a data set and return the columns of its rows. Raises DataError for one that cannot be read."""
    opened = _opened[path] = _open(path)
    columns = opened.column_names
    if columns is None:  # the files do not say before they are read
        try:
            columns = list(next(iter(opened), {}))
        except Exception as error:  # every format's library raises different errors
            raise _unreadable(path, error) from None
    return list(columns)


def shards_of(path: str) -> int:
    """Return how many shards a data set has that `columns_of` opened."""
    return int(_opened[path].num_shards)


def version_of(path: str) -> list[Any]:
    """Return what changes where the files of a data set do, of one that `columns_of` opened: the commit of the hub, or
    the times of files."""
    return [*_versions[path]]


def shard_rows(path: str, shard: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield columns of the rows of a shard, those that a row has. Where one cannot be read, the error is that of the
    library that reads the format."""
    opened = _opened[path] if path in _opened else _open(path)
    for row in opened.shard(num_shards=opened.num_shards, index=shard):
        yield {name: row[name] for name in columns if name in row}


def _open(path: str) -> Any:
    found = _NAME.fullmatch(name_of(path))
    if found is None:
        raise DataError(f"{name_of(path)} names no data set; allowed: hf://NAME, hf://NAME@CONFIGURATION:SPLIT")
    library = require("datasets", "data", feature=f"reading {name_of(path)}")
    try:
        builder = library.load_dataset_builder(found["name"], found["config"])
        if builder.name in _FORMATS:  # before a file is opened: some readers look into the first ones at once
            files = getattr(getattr(builder, "config", None), "data_files", None) or {}
            _versions[path] = [[str(split), its.origin_metadata] for split, its in sorted(files.items())]
            return builder.as_streaming_dataset(found["split"] or "train")
    except Exception as error:  # the hub, the file system, and every format's library raise different errors
        raise _unreadable(path, error) from None
    raise DataError(
        f"{name_of(path)} is read as {builder.name}, which may unpickle; allowed: text, JSON, CSV, Parquet and Arrow "
        "files"
    )


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"{name_of(path)} cannot be read: {one_line(error)[:300]}")
