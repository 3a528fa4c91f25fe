"""The header of a safetensors file, parsed with no trust in its content.

A file is `N` (8 bytes, little endian), `N` bytes of JSON `{name: {dtype, shape, data_offsets}, "__metadata__": {...}}`
padded with spaces, then the data. Checked here, before any data is touched: every tensor lies inside the file, its
byte count matches its shape and dtype, and the tensors tile the data with no hole and no overlap. So a reader that
follows the header can neither leave the file nor read one byte as two tensors.

The safetensors library checks most of this too, but it accepts duplicate keys, and its messages name neither the tensor
nor the problem, hence this module.

Entries are read one after the other without a JSON tree of all of them: a tree takes ten times the memory of its text,
so the general parser bounds the number of values, and with it the number of tensors. Writers of the format all write an
entry in one way, and a regular expression reads that with a tenth of the memory and time; a header that is written
otherwise is left to the general parser.
"""

import contextlib
import gc
import hashlib
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .dtypes import bit_width
from .errors import CheckpointError, quote
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

MAX_HEADER_BYTES = 64 << 20
_MAX_PARSED = 16 << 20
"""Of a header that the general parser has to read; it may hold fewer tensors than fit in this."""
_MAX_RANK = 16
_MAX_NAME = 1024
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

Entry = tuple[str, str, tuple[int, ...], tuple[int, int]]
"""Name, dtype, shape, data_offsets; the numbers are below 10^18."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: safetensors dtype name, shape, and byte range [start, stop) in the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Sizes = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]]
"""Dtype and shape -> the same objects again, and the number of bits: files have many equal ones."""


@dataclass(frozen=True)
class Header:
    """A parsed header: tensors in file order, metadata, the position in the file where the data begins, and the SHA-256
    of all before it."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    sha256: str = ""


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor (dtypes narrower than a byte must fill whole bytes)."""
    bits = math.prod(shape) * (bit_width(dtype) or 0)
    if bits % 8:
        raise CheckpointError(f"a {dtype} tensor of shape {list(shape)} does not fill whole bytes")
    return bits // 8


def read_header(path: Path, where: str | None = None) -> Header:
    """Read and check the header of a file; any defect raises CheckpointError naming file, tensor and defect."""
    where = where or path.name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be opened: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{where} is not a regular file")
        prefix = os.pread(fd, 8, 0)
        if len(prefix) < 8:
            raise CheckpointError(f"{where} is truncated: {info.st_size} bytes cannot hold a safetensors header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{where} claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
            )
        if 8 + length > info.st_size:
            raise CheckpointError(
                f"{where} is truncated: its header ends at byte {8 + length}, the file at {info.st_size}"
            )
        raw = os.pread(fd, length, 8)
    finally:
        os.close(fd)
    digest = hashlib.sha256(prefix)
    digest.update(raw)
    return replace(parse_header(raw, info.st_size - 8 - length, where), sha256=digest.hexdigest())


def parse_header(raw: bytes, data_bytes: int, where: str) -> Header:
    """Parse the JSON part of a header whose file has `data_bytes` bytes after it."""
    if not raw.startswith(b"{"):
        raise CheckpointError(f"the header of {where} does not start with '{{', so this is not a safetensors file")
    tensors: dict[str, TensorInfo] = {}
    sizes: Sizes = {}
    entries, metadata = _entries(raw, where)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"the __metadata__ of {where} is not a map from strings to strings")
    with without_collections():
        for name, dtype, shape, offsets in entries:
            if name in tensors:
                raise CheckpointError(f"the header of {where} has the key {quote(name)} twice in one object")
            tensors[name] = _check_entry(name, dtype, shape, offsets, sizes, where)
    position, ordered = 0, list(tensors.items())
    ordered.sort(key=lambda item: (item[1].start, item[1].stop))
    for name, info in ordered:
        if info.start != position:
            defect = (
                "overlaps the tensor before it" if info.start < position else f"leaves a hole at data byte {position}"
            )
            raise CheckpointError(f"{where}: tensor {quote(name)} {defect}")
        position = info.stop
    if position > data_bytes:
        raise CheckpointError(f"{where} is truncated: its tensors need {position} data bytes and it has {data_bytes}")
    if position < data_bytes:
        raise CheckpointError(f"{where} has {data_bytes - position} bytes after its last tensor")
    return Header(dict(ordered), metadata, 8 + len(raw))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause the collector of cycles: it would look at all objects again and again while ours, without cycles, grow in
    number."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _entries(raw: bytes, where: str) -> tuple[Iterable[tuple[str, Any, Any, Any]], Any]:
    """Return (name, dtype, shape, data_offsets) of every tensor, and the metadata, nothing of it checked."""
    if (found := _scan(raw, where)) is not None:
        return found
    if len(raw) > _MAX_PARSED:
        raise CheckpointError(f"the header of {where} is not written as is usual, and too long to be parsed otherwise")
    values = parse_object(raw, f"the header of {where}")
    metadata = values.pop("__metadata__", {})
    for name, entry in values.items():
        if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
            _check_name(name, where)
            raise CheckpointError(
                f"{where}: tensor {quote(name)} is not described by exactly dtype, shape and data_offsets"
            )
    return [(name, e["dtype"], e["shape"], e["data_offsets"]) for name, e in values.items()], metadata


def _scan(text: bytes, where: str) -> tuple[Iterator[Entry], dict[str, Any]] | None:
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
    return _scanned(text, begin, where), metadata


def _scanned(text: bytes, begin: int, where: str) -> Iterator[Entry]:
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


def _check_name(name: str, where: str) -> None:
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"{where}: tensor {quote(name)} has an unusable name (empty, over {_MAX_NAME} characters, or not printable)"
        )


def _check_entry(name: str, dtype: Any, shape: Any, offsets: Any, sizes: Sizes, where: str) -> TensorInfo:
    """Return the description of a tensor; shape and offsets are tuples where they are known to be natural numbers."""
    _check_name(name, where)
    place = f"{where}: tensor"
    bits = bit_width(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise CheckpointError(f"{place} {quote(name)} has the unknown dtype {str(dtype)[:40]!r}")
    if len(shape) > _MAX_RANK if type(shape) is tuple else not _naturals(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(
            f"{place} {quote(name)} has a shape that is not a list of at most {_MAX_RANK} natural numbers"
        )
    if (type(offsets) is not tuple and not _naturals(offsets)) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{place} {quote(name)} has data_offsets that are not a range [begin, end]")
    start, stop = offsets
    key = dtype, tuple(shape)
    if key not in sizes:
        sizes[key] = (*key, math.prod(shape) * bits)
    dtype, size, needed = sizes[key]
    if needed != 8 * (stop - start):
        raise CheckpointError(
            f"{place} {quote(name)} has {stop - start} bytes, but {dtype} {list(shape)} needs {-(-needed // 8)}"
        )
    return TensorInfo(dtype, size, start, stop)


def _naturals(values: Any) -> bool:
    if not isinstance(values, list) or set(map(type, values)) - {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < 2**63)
