"""manifest.json: size and SHA-256 of every file of a folder and of every tensor, to notice a damaged or edited copy.

    {"format_version": 1, "files": {"config.json": {"sha256": "...", "bytes": 813},
                                    "model.safetensors": {"sha256": "...", "bytes": 9712, "tensors": {"a": "..."}}}}

The digest of a file is the one that `sha256sum` prints. That of a tensor is of its data alone, so it stays the same
when the tensor moves to another file, and it says which tensors of a damaged file are the damaged ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, quote, shorten
from .hashing import FileRecord, Lane, record_of
from .strict_json import dump_object, read_object
from .weight_files import file_inside, plain_file

MANIFEST = "manifest.json"


def manifest_bytes(records: Mapping[str, FileRecord]) -> bytes:
    """Return the content of manifest.json."""
    return dump_object({"format_version": 1, "files": {name: to_dict(record) for name, record in records.items()}})


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Read a folder's manifest.json."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / MANIFEST).exists() and not (folder / MANIFEST).is_symlink():
        raise CheckpointError(
            f"{folder} has no {MANIFEST} that it could be checked against: te-models writes one into each of its "
            "folders; a second folder may be named to compare it with"
        )
    files = read_object(plain_file(folder, MANIFEST), MANIFEST).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{MANIFEST} has no 'files'")
    return {name: from_dict(name, entry) for name, entry in files.items()}


def to_dict(record: FileRecord) -> dict[str, Any]:
    """Return a record as JSON values."""
    values: dict[str, Any] = {"sha256": record.sha256, "bytes": record.size}
    return values | ({"tensors": record.tensors} if record.tensors else {})


def from_dict(name: str, entry: Any) -> FileRecord:
    """Return the record of a file from JSON values; anything else raises CheckpointError."""
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or type(entry.get("bytes")) is not int:
        raise CheckpointError(f"{MANIFEST} describes {quote(name)} by something other than sha256 and bytes")
    tensors = entry.get("tensors", {})
    if not isinstance(tensors, dict) or not all(isinstance(digest, str) for digest in tensors.values()):
        raise CheckpointError(f"{MANIFEST} does not map the tensors of {quote(name)} to their sha256")
    return FileRecord(entry["sha256"], entry["bytes"], tensors)


def check_manifest(folder: str | Path, *, progress: Callable[[int, int], None] | None = None) -> int:
    """Check every file and tensor that manifest.json lists; return how many files.

    Raises:
        CheckpointError: names the first file that is not as listed, and which of its tensors are damaged.
    """
    folder = Path(folder)
    records = read_manifest(folder)
    paths = {name: file_inside(folder, name, MANIFEST) for name in records}
    total, done = sum(record.size for record in records.values()), 0

    def moved(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for name, record in records.items():
        size = paths[name].stat().st_size
        if size != record.size:
            raise CheckpointError(f"{name} has {size} bytes and {MANIFEST} says {record.size}")
    with Lane() as lane:
        for name, record in records.items():
            if record.tensors:
                _check_weights(name, record, record_of(paths[name], lane, moved))
            else:
                _check_file(name, record, paths[name])
    return len(records)


def _check_file(name: str, record: FileRecord, path: Path) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            raise CheckpointError(f"{name} does not have the SHA-256 that {MANIFEST} says; it was changed or damaged")


def _check_weights(name: str, record: FileRecord, found: FileRecord) -> None:
    differing = [t for t in {**record.tensors, **found.tensors} if record.tensors.get(t) != found.tensors.get(t)]
    if found.sha256 == record.sha256 and not differing:
        return
    what = f"tensor {shorten(differing)}" if differing else "its header"
    raise CheckpointError(f"{name} does not have the SHA-256 that {MANIFEST} says; {what} was changed or damaged")
