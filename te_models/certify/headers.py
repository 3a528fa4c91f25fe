"""The headers of a checkpoint's weight files, fetched a few at a time, and a store of their tensors without data."""

import hashlib
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from te_models.checkpoints.io.errors import CheckpointError, UnreadError
from te_models.checkpoints.io.header import MAX_HEADER_BYTES, Header, parse_header
from te_models.checkpoints.io.store import FileStore
from te_models.checkpoints.io.weight_files import INDEX, SINGLE, check_index, check_numbers, is_file_name, read_index

from .source import CheckpointFiles

SMALL_FILES = ("config.json", "hf_quant_config.json", INDEX)
"""What is read whole."""
_MAX_SMALL = 256 << 20
_FIRST = 64 << 10
"""Bytes of a weight file that are asked for at once: the header of a file of usual size fits."""
_AT_A_TIME = 8
_ONE = {"F32": b"\0\0\x80?", "F16": b"\0<", "BF16": b"\x80?", "F8_E8M0": b"\x7f", "U8": b"\x7f", "F8_E4M3": b"8"}
"""The bytes of a 1, with which scales stand in that are not read; scales of MX formats are exponents."""


class HeaderStore(FileStore):
    """The tensors that headers describe. What is read of one is `read_part` of its file; without `scales`, a 1 repeated
    where it is a number, and read where it describes others (bitsandbytes' `quant_state`)."""

    def __init__(
        self,
        headers: Mapping[str, Header],
        weight_map: Mapping[str, str] | None,
        read_part: Callable[[str, int, int], bytes],
        scales: bool = False,
    ) -> None:
        super().__init__({})
        self._hold(headers, weight_map)
        self._read_part, self._scales = read_part, scales

    def read_unchecked(self, name: str, begin: int, buffer: memoryview) -> None:
        info, file, buffer = self.tensors[name], self.file_of[name], buffer.cast("B")
        if self._scales or ".quant_state." in name:
            start = self._data_start[file] + info.start + begin
            buffer[:] = self._read_part(file, start, start + len(buffer))
            return
        one = _ONE.get(info.dtype)
        if one is None:
            raise UnreadError(f"{name!r} is no scale, and has to be read to say more: --scales reads such tensors")
        buffer[:] = one * (len(buffer) // len(one))

    def first_out_of_order(self) -> str | None:
        """Return the first tensor that gives columns to groups if these are not runs of columns. It alone is read: a
        tool orders all weights by importance, or none."""
        name = next((name for name in self.tensors if name.endswith("g_idx")), None)
        if name is None:
            return None
        info, file = self.tensors[name], self.file_of[name]
        start = self._data_start[file] + info.start
        groups = array("q" if info.dtype == "I64" else "i", self._read_part(file, start, start + info.nbytes)).tolist()
        return None if groups == sorted(groups) else name


def small_files(source: CheckpointFiles, folder: Path) -> None:
    """Copy the configuration and the index of a checkpoint into a folder."""
    for name in SMALL_FILES:
        size = source.size(name)
        if size is None and name == "config.json":
            raise CheckpointError(f"{source.name} has no {name}")
        if size is not None:
            if size > _MAX_SMALL:
                raise CheckpointError(f"{name} of {source.name} has {size} bytes, more than the {_MAX_SMALL} allowed")
            (folder / name).write_bytes(source.read(name, 0, size))


def read_headers(
    source: CheckpointFiles, folder: Path, *, scales: bool, progress: Callable[[int, int], None] | None = None
) -> HeaderStore:
    """Return the tensors of a checkpoint whose small files are in `folder`.

    scales: whether what is read of them is fetched, too. progress: called with (files done, files in total). Raises
    CheckpointError for a file that is missing, shorter than its header says, or no safetensors file.
    """
    weight_map = read_index(folder / INDEX) if (folder / INDEX).exists() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else _files(source)
    for name in files:
        if not is_file_name(name):
            raise CheckpointError(f"{INDEX} of {source.name} names {name!r}, which is not a plain file name")
    headers: dict[str, Header] = {}
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        try:
            for begin in range(0, len(files), _AT_A_TIME):  # so that few unparsed headers are in memory
                several = files[begin : begin + _AT_A_TIME]
                for name, (raw, size) in zip(several, threads.map(lambda file: _fetch(source, file), several)):
                    parsed = parse_header(raw[8:], size - len(raw), name)
                    headers[name] = replace(parsed, sha256=hashlib.sha256(raw).hexdigest())
                if progress is not None:
                    progress(len(headers), len(files))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    store = HeaderStore(headers, weight_map, source.read, scales)
    if weight_map is not None:
        check_index(store, weight_map)
    return store


def digest_of(folder: Path, store: FileStore) -> str:
    """Return one SHA-256 of the small files and of all headers, by which a certificate knows its checkpoint again."""
    digest = hashlib.sha256()
    for name in SMALL_FILES:
        if (folder / name).exists():
            digest.update(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    for name in sorted(store.header_digests):
        digest.update(f"{name} {store.header_digests[name]}\n".encode())
    return digest.hexdigest()


def _files(source: CheckpointFiles) -> list[str]:
    """Return the names of the weight files of a checkpoint without an index."""
    if source.size(SINGLE) is not None:
        return [SINGLE]
    files = source.weight_files()
    check_numbers(source.name, files)
    if not files:
        raise CheckpointError(f"{source.name} has no weights: neither {SINGLE} nor {INDEX}")
    return files


def _fetch(source: CheckpointFiles, file: str) -> tuple[bytes, int]:
    """Return the first bytes of a file, up to the end of its header, and the bytes of the whole file."""
    size = source.size(file)
    if size is None:
        raise CheckpointError(f"{source.name} lacks the weight file {file}")
    if size < 8:
        raise CheckpointError(f"{file} is truncated: {size} bytes cannot hold a safetensors header")
    first = source.read(file, 0, min(size, _FIRST))
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file} claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if 8 + length > size:
        raise CheckpointError(f"{file} is truncated: its header ends at byte {8 + length}, the file at {size}")
    if 8 + length > len(first):
        first += source.read(file, len(first), 8 + length)
    return first[: 8 + length], size
