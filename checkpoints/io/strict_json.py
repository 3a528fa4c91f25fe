"""Read JSON from files that strangers wrote: bounded size, no duplicate keys, no NaN, objects only.

Why not plain `json.loads`: it keeps the last of two equal keys (so two readers of one file can disagree about what it
says), accepts NaN, and answers deep nesting with RecursionError.
"""

import json
import math
import stat
from pathlib import Path
from typing import Any

from .errors import CheckpointError, quote

MAX_JSON_BYTES = 32 << 20
"""The index of a mixture of 384 experts in 60 layers, with scales, has 15 MB."""
_MAX_WIDE_BYTES = 8 << 20
"""Of text with characters beyond ASCII: as soon as there is one, all take up to four bytes each."""
_MAX_ESCAPES = 2_000_000
"""Backslashes; each takes as long to read as a hundred characters."""

MAX_VALUES = 400_000
"""Numbers, strings, lists and objects in one text, counted before it is parsed: as Python objects they take up to 350
bytes each and microseconds to make. A mixture of 384 experts in 60 layers, with scales, has 140,000 tensors."""


def check_escapes(data: bytes, where: str) -> None:
    """Raise CheckpointError for JSON text with more escapes than any checkpoint has."""
    if data.count(b"\\") > _MAX_ESCAPES:
        raise CheckpointError(f"{where} holds more than the {_MAX_ESCAPES} escapes allowed for a checkpoint's JSON")


def parse_object(data: bytes, where: str, limit: int | None = None) -> dict[str, Any]:
    """Parse one JSON object from UTF-8 bytes; `where` names the file in the error. limit: values, below MAX_VALUES."""
    limit = MAX_VALUES if limit is None else min(limit, MAX_VALUES)
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > limit:
        raise CheckpointError(f"{where} holds more than the {limit} values allowed for a checkpoint's JSON")
    check_escapes(data, where)
    if len(data) > _MAX_WIDE_BYTES and (not data.isascii() or b"\\u" in data):
        raise CheckpointError(
            f"{where} has {len(data)} bytes and characters beyond ASCII; allowed with these: {_MAX_WIDE_BYTES} bytes"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 text (byte {error.start})") from None

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{where} has the key {quote(twice)} twice in one object")
        return values

    def no_constant(name: str) -> Any:
        raise CheckpointError(f"{where} contains {name}, which is not JSON")

    def finite(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise CheckpointError(f"{where} contains a number out of range, {digits[:40]}")
        return value

    try:
        values = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant, parse_float=finite)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply to be a checkpoint's JSON") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} holds a JSON {type(values).__name__} where an object is expected")
    return values


def read_object(path: Path, where: str | None = None, *, limit: int | None = None) -> dict[str, Any]:
    """Read and parse a JSON file; a missing, oversize or malformed one raises CheckpointError. limit: values."""
    where = where or str(path)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{where} is not a regular file")
        if info.st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{where} has {info.st_size} bytes, more than the {MAX_JSON_BYTES} allowed for JSON")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from None
    return parse_object(data, where, limit)


def dump_object(values: dict[str, Any]) -> bytes:
    """Return indented JSON bytes with sorted keys, as transformers writes its configuration files."""
    return (json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()
