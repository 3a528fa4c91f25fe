"""manifest.json: size and SHA-256 of every file of a folder and of every tensor, to notice a damaged or edited copy.

    {"format_version": 1, "files": {"config.json": {"sha256": "...", "bytes": 813},
                                    "model.safetensors": {"sha256": "...", "bytes": 9712, "header": "...",
                                                          "tensors": {"a": "..."}}}}

The digest of a file is the one that `sha256sum` prints. The digest of a tensor is of its data alone, so it stays the
same when the tensor moves to another file, and it says which tensors of a damaged file are the damaged ones. `header`
is the digest of the bytes before the data; folders of earlier releases do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, quote, shorten, shown
from .hashing import FileRecord, Lane, file_digest, record_of
from .strict_json import MAX_JSON_BYTES, dump_object, read_object
from .weight_files import INDEX, TEMPLATES, file_inside, plain_file

MANIFEST = "manifest.json"


class Manifest(dict[str, FileRecord]):
    """File name -> record. partial: see `manifest_bytes`."""

    def __init__(self, records: Mapping[str, FileRecord], *, partial: bool) -> None:
        super().__init__(records)
        self.partial = partial


def manifest_bytes(records: Mapping[str, FileRecord], *, partial: bool = False) -> bytes:
    """Return the content of manifest.json. partial: other programs write further files beside these, as transformers
    its tokenizers, so that only weights which are not listed are unexpected."""
    files = {name: to_dict(record) for name, record in records.items()}
    return dump_object({"format_version": 1, "files": files} | ({"partial": True} if partial else {}))


def read_manifest(folder: Path, *, limit: int | None = None) -> Manifest:
    """Read a folder's manifest.json, file name -> record; limit: values that it may hold."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / MANIFEST).exists() and not (folder / MANIFEST).is_symlink():
        raise CheckpointError(
            f"{folder} has no {MANIFEST} that it could be checked against: te-models writes one into each of its "
            "folders; a second folder may be named to compare it with"
        )
    values = read_object(plain_file(folder, MANIFEST), MANIFEST, limit=limit)
    version = values.get("format_version")
    if type(version) is not int or version != 1:
        raise CheckpointError(f"{MANIFEST} has format_version {shown(version)}; this release reads version 1")
    files = values.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{MANIFEST} has no 'files'")
    partial = values.get("partial", False)
    if not isinstance(partial, bool):
        raise CheckpointError(f"{MANIFEST} has partial = {shown(partial)}; allowed: true, false")
    return Manifest({name: from_dict(name, entry) for name, entry in files.items()}, partial=partial)


def is_manifest(folder: Path) -> bool:
    """Whether a folder's manifest.json is one of ours, damaged or not: other programs write files of that name."""
    path = folder / MANIFEST
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return False
    text = plain_file(folder, MANIFEST).read_bytes()
    return b'"sha256"' in text or b'"format_version"' in text


def to_dict(record: FileRecord) -> dict[str, Any]:
    """Return a record as JSON values."""
    values: dict[str, Any] = {"sha256": record.sha256, "bytes": record.size}
    values |= {"header": record.header} if record.header else {}
    return values | ({"tensors": record.tensors} if record.tensors else {})


def from_dict(name: str, entry: Any) -> FileRecord:
    """Return the record of a file from JSON values; anything else raises CheckpointError."""
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or type(entry.get("bytes")) is not int:
        raise CheckpointError(f"{MANIFEST} describes {quote(name)} by something other than sha256 and bytes")
    tensors, header = entry.get("tensors", {}), entry.get("header", "")
    if not isinstance(tensors, dict) or not all(isinstance(digest, str) for digest in tensors.values()):
        raise CheckpointError(f"{MANIFEST} does not map the tensors of {quote(name)} to their sha256")
    if not isinstance(header, str):
        raise CheckpointError(f"{MANIFEST} describes the header of {quote(name)} by something other than its sha256")
    return FileRecord(entry["sha256"], entry["bytes"], tensors, header)


def check_manifest(folder: str | Path, *, progress: Callable[[int, int], None] | None = None) -> int:
    """Check every file and tensor that manifest.json lists, and that there are no others; return how many files.

    Files whose names begin with a dot are no part of a folder.

    Raises:
        CheckpointError: names the files that are not listed, or the first file that is not as listed and which of its
            tensors are damaged.
    """
    folder = Path(folder)
    records = read_manifest(folder)
    paths = {name: file_inside(folder, name, MANIFEST) for name in records}
    unlisted = sorted(name for name in _names(folder) if name not in records and name != MANIFEST)
    if records.partial:
        unlisted = [name for name in unlisted if name == INDEX or name.endswith(".safetensors")]
    if unlisted:
        raise CheckpointError(f"{folder} holds what {MANIFEST} does not list: {shorten(unlisted)}")
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


def _names(folder: Path) -> Iterator[str]:
    """List what a folder holds: files by name, those among its chat templates by `additional_chat_templates/NAME`."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.name == TEMPLATES and path.is_dir():
            yield from (f"{TEMPLATES}/{inner.name}" for inner in path.iterdir() if not inner.name.startswith("."))
        else:
            yield path.name


def _check_file(name: str, record: FileRecord, path: Path) -> None:
    if file_digest(path) != record.sha256:
        raise CheckpointError(f"{name} does not have the SHA-256 that {MANIFEST} says; it was changed or damaged")


def _check_weights(name: str, record: FileRecord, found: FileRecord) -> None:
    differing = [t for t in {**record.tensors, **found.tensors} if record.tensors.get(t) != found.tensors.get(t)]
    header = bool(record.header) and record.header != found.header
    if found.sha256 == record.sha256 and not differing and not header:
        return
    what = f"tensor {shorten(differing)}" if differing else "its header"
    raise CheckpointError(f"{name} does not have the SHA-256 that {MANIFEST} says; {what} was changed or damaged")


def record_files(
    paths: Mapping[str, Path], moved: Callable[[int], None] = lambda nbytes: None
) -> dict[str, FileRecord]:
    """Return the records of files as they are now, by the names given: those of safetensors files with their tensors.

    moved: called with the number of bytes of each part of a safetensors file read.
    """
    records = {}
    with Lane() as lane:
        for name, path in paths.items():
            if path.suffix == ".safetensors":
                records[name] = record_of(path, lane, moved)
            else:
                records[name] = FileRecord(file_digest(path), path.stat().st_size)
    return records


def check_listed(folder: Path, paths: Mapping[str, Path], *, read: Mapping[str, Path] | None = None) -> None:
    """Check that manifest.json of `folder` describes exactly these files, every byte of them, and says nothing else.

    paths: name in the manifest -> the file, which has been found to be a regular one. read: those of them whose bytes
    are read, where other readers check the others; None: all.

    Raises:
        CheckpointError: names the first file that is not as listed, and which of its tensors are damaged.
    """
    values = read_object(plain_file(folder, MANIFEST), MANIFEST)
    version, entries = values.get("format_version"), values.get("files")
    if type(version) is not int or version != 1:
        raise CheckpointError(f"{MANIFEST} has format_version {quote(str(version))}; this release reads 1")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{MANIFEST} has no 'files'")
    records = {name: from_dict(name, entry) for name, entry in entries.items()}
    differing = [name for name in {**records, **paths} if (name in records) != (name in paths)]
    if differing:
        raise CheckpointError(f"{MANIFEST} lists other files than there should be: {shorten(differing)}")
    for name, path in paths.items():
        size = path.stat().st_size
        if size != records[name].size:
            raise CheckpointError(f"{name} has {size} bytes and {MANIFEST} says {records[name].size}")
    found = records | record_files(paths if read is None else read)
    for name, record in records.items():
        if record.tensors:
            _check_weights(name, record, found[name])
        elif found[name].sha256 != record.sha256:
            raise CheckpointError(f"{name} does not have the SHA-256 that {MANIFEST} says; it was changed or damaged")
    if plain_file(folder, MANIFEST).read_bytes() != manifest_bytes(found):  # every byte of it counts, too
        raise CheckpointError(f"{MANIFEST} is not as te-models writes it; it was changed or damaged")
