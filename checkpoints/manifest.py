"""manifest.json: size and SHA-256 of every file of a folder, to notice a damaged or edited copy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .strict_json import dump_object, read_object
from .weight_files import plain_file

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """What one file must be."""

    sha256: str
    size: int


def manifest_bytes(records: Mapping[str, FileRecord]) -> bytes:
    """Return the content of manifest.json."""
    files = {name: {"sha256": record.sha256, "bytes": record.size} for name, record in records.items()}
    return dump_object({"format_version": 1, "files": files})


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Read a folder's manifest.json."""
    files = read_object(plain_file(folder, MANIFEST), MANIFEST).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{MANIFEST} has no 'files'")
    records = {}
    for name, entry in files.items():
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("sha256"), str)
            or type(entry.get("bytes")) is not int
        ):
            raise CheckpointError(f"{MANIFEST} describes {name!r} by something other than sha256 and bytes")
        records[name] = FileRecord(entry["sha256"], entry["bytes"])
    return records


def check_manifest(folder: str | Path) -> int:
    """Check every file that manifest.json lists; return how many, or raise CheckpointError naming the first bad one."""
    folder = Path(folder)
    records = read_manifest(folder)
    for name, record in records.items():
        path = plain_file(folder, name, MANIFEST)
        size = path.stat().st_size
        if size != record.size:
            raise CheckpointError(f"{name} has {size} bytes and {MANIFEST} says {record.size}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                raise CheckpointError(
                    f"{name} does not have the SHA-256 that {MANIFEST} says; it was changed or damaged"
                )
    return len(records)
