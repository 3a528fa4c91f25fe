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
from .strict_json import check_escapes, parse_object

MAX_TENSORS = 125_000
"""In one file. As objects, with their names, they take 40 MiB and most of a second. A mixture of 384 experts in 60
layers has 70,000 weights and, quantized, as many scales."""

MAX_METADATA_BYTES = 16 << 20
"""In one file; the descriptions of 10,000 quantized weights take about half of it."""

_S = rb"[ \t\n\r]*+"
_STRING = rb'"([^"\\\x00-\x1f]*+)"'
_NATURAL = rb"(?:0|[1-9][0-9]{0,17})"
_ENTRY = re.compile(
    rb'%(S)s%(STRING)s%(S)s:%(S)s\{%(S)s"dtype"%(S)s:%(S)s"([A-Z0-9_]{1,16})"%(S)s,%(S)s'
    rb'"shape"%(S)s:%(S)s\[%(S)s((?:%(NATURAL)s(?:%(S)s,%(S)s%(NATURAL)s)*+)?)%(S)s\]%(S)s,%(S)s'
    rb'"data_offsets"%(S)s:%(S)s\[%(S)s(%(NATURAL)s)%(S)s,%(S)s(%(NATURAL)s)%(S)s\]%(S)s\}%(S)s([,}])'
    % {b"S": _S, b"STRING": _STRING, b"NATURAL": _NATURAL}
)
_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
_METADATA = re.compile(
    rb'%(S)s"__metadata__"%(S)s:%(S)s(\{%(S)s(?:%(TEXT)s%(S)s:%(S)s%(TEXT)s%(S)s,?%(S)s)*+\})%(S)s([,}])'
    % {b"S": _S, b"TEXT": _TEXT}
)

Entry = tuple[str, str, tuple[int, ...], tuple[int, int]]
"""Name, dtype, shape, data_offsets; the numbers are below 10^18."""


def scan(text: bytes, where: str) -> tuple[Iterator[Entry], dict[str, Any]] | None:
    """Return the entries and the metadata of the JSON text of a header; None where it is not in the usual form.

    The text stays bytes, of which only names are decoded: one character beyond ASCII makes text four times as large.

    The whole text is looked through before this returns. Raises CheckpointError for too many tensors, and for metadata
    that is no strict JSON.
    """
    metadata: dict[str, Any] = {}
    check_escapes(text, f"the header of {where}")
    position, last, count = 1, b",", 0
    if found := _METADATA.match(text, position):
        if found.end(1) - found.start(1) > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"the __metadata__ of {where} has {found.end(1) - found.start(1)} bytes, more than the "
                f"{MAX_METADATA_BYTES} allowed"
            )
        metadata = parse_object(found[1], f"the header of {where}")
        position, last = found.end(), found[2]
    begin = position
    while last == b",":
        found = _ENTRY.match(text, position)
        if found is None or found[1] == b"__metadata__":
            return None
        position, last, count = found.end(), found[6], count + 1
        if count > MAX_TENSORS:
            raise CheckpointError(f"{where} holds more than the {MAX_TENSORS} tensors allowed in one file")
    if text[position:].strip(b" \t\n\r"):
        return None
    return _entries(text, begin, where), metadata


def _entries(text: bytes, begin: int, where: str) -> Iterator[Entry]:
    shapes: dict[bytes, tuple[int, ...]] = {}
    dtypes: dict[bytes, str] = {}
    for found in _ENTRY.finditer(text, begin):
        raw, dtype, shape, start, stop, _ = found.groups()
        if shape not in shapes:
            shapes[shape] = tuple(int(n) for n in shape.split(b",")) if shape else ()
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            at = found.start(1) + error.start
            raise CheckpointError(f"the header of {where} is not UTF-8 text (byte {at})") from None
        yield name, dtypes.setdefault(dtype, dtype.decode()), shapes[shape], (int(start), int(stop))
