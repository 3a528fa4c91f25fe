"""The entries of a safetensors header, read one after the other without a JSON tree of all of them.

A tree takes ten times the memory of its text, so the general parser bounds the number of values, and with it that of
tensors. Writers of the format all write an entry in one way, which is read here with a tenth of that memory and time;
a header that is written otherwise is left to the general parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .errors import CheckpointError
from .strict_json import parse_object

MAX_TENSORS = 125_000
"""In one file. As objects, with their names, they take 40 MiB and most of a second. A mixture of 384 experts in 60
layers has 70,000 weights and, quantized, as many scales."""

_S = r"[ \t\n\r]*+"
_STRING = r'"([^"\\\x00-\x1f]*+)"'
_NATURAL = r"(?:0|[1-9][0-9]{0,17})"
_ENTRY = re.compile(
    rf'{_S}{_STRING}{_S}:{_S}\{{{_S}"dtype"{_S}:{_S}"([A-Z0-9_]{{1,16}})"{_S},{_S}'
    rf'"shape"{_S}:{_S}\[{_S}((?:{_NATURAL}(?:{_S},{_S}{_NATURAL})*+)?){_S}\]{_S},{_S}'
    rf'"data_offsets"{_S}:{_S}\[{_S}({_NATURAL}){_S},{_S}({_NATURAL}){_S}\]{_S}\}}{_S}([,}}])'
)
_TEXT = r'"(?:[^"\\\x00-\x1f]|\\.)*+"'
_METADATA = re.compile(rf'{_S}"__metadata__"{_S}:{_S}(\{{{_S}(?:{_TEXT}{_S}:{_S}{_TEXT}{_S},?{_S})*+\}}){_S}([,}}])')

Entry = tuple[str, str, tuple[int, ...], tuple[int, int]]
"""Name, dtype, shape, data_offsets; the numbers are below 10^18."""


def scan(text: str, where: str) -> tuple[Iterator[Entry], dict[str, Any]] | None:
    """Return the entries and the metadata of the JSON text of a header; None where it is not in the usual form.

    The whole text is looked through before this returns. Raises CheckpointError for too many tensors, and for metadata
    that is no strict JSON.
    """
    metadata: dict[str, Any] = {}
    position, last, count = 1, ",", 0
    if found := _METADATA.match(text, position):
        metadata = parse_object(found[1].encode("utf-8", "surrogatepass"), f"the header of {where}")
        position, last = found.end(), found[2]
    begin = position
    while last == ",":
        found = _ENTRY.match(text, position)
        if found is None or found[1] == "__metadata__":
            return None
        position, last, count = found.end(), found[6], count + 1
        if count > MAX_TENSORS:
            raise CheckpointError(f"{where} holds more than the {MAX_TENSORS} tensors allowed in one file")
    if text[position:].strip(" \t\n\r"):
        return None
    return _entries(text, begin), metadata


def _entries(text: str, begin: int) -> Iterator[Entry]:
    shapes: dict[str, tuple[int, ...]] = {}
    for found in _ENTRY.finditer(text, begin):
        name, dtype, shape, start, stop, _ = found.groups()
        if shape not in shapes:
            shapes[shape] = tuple(int(n) for n in shape.split(",")) if shape else ()
        yield name, dtype, shapes[shape], (int(start), int(stop))
