"""manifest.json: size and SHA-256 of every file of a folder and of every tensor, to notice a damaged or edited copy.

    {"format_version": 3, "files": {"config.json": {"sha256": "...", "bytes": 813},
                                    "model.safetensors": {"digest": "...", "bytes": 9712, "header": "...",
                                                          "rows_per_part": 64, "tensors": {"a": "..."}}}}

The digest of a tensor is of its shape and data alone, so it stays the same when the tensor moves to another file, and
it says which tensors of a damaged file are the damaged ones. It is made of the digests of its parts
(`tensor_hash.part_bytes`), so that a conversion which splits or joins tensors by rows hashes every byte once. `header`
is the digest of the bytes before the data. `digest`, one number for a whole weight file, is made of these
(`hashing.joint_digest`). Where that was asked for, `sha256`, what `sha256sum` prints, stands in its place.

Earlier releases wrote versions 1 and 2, without `rows_per_part`: the digest of a tensor is SHA-256 of its data. A
weight file of version 1 has `sha256` and not always `header`.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, EditedFileWarning, quote, shorten, shown_untrusted
from .hashing import FileRecord, Lane, file_digest, joint_digest, record_of
from .strict_json import MAX_JSON_BYTES, dump_object, read_object
from .tensor_hash import ROWS_PER_PART
from .weight_files import INDEX, TEMPLATES, file_inside, is_file_name, plain_file

MANIFEST = "manifest.json"
_STRICT = ("config.json", "hf_quant_config.json", INDEX, MANIFEST)
_VERSIONS = (1, 2, 3)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Manifest(dict[str, FileRecord]):
    """File name -> record. partial: see `manifest_bytes`."""

    def __init__(self, records: Mapping[str, FileRecord], *, partial: bool) -> None:
        super().__init__(records)
        self.partial = partial


def manifest_bytes(records: Mapping[str, FileRecord], *, partial: bool = False) -> bytes:
    """Return the content of manifest.json. partial: other programs write further files beside these, as transformers
    its tokenizers, so that only weights which are not listed are unexpected."""
    files = {name: to_dict(record) for name, record in records.items()}
    version = 2 if any(record.digest for record in records.values()) else 1
    version = 3 if any(record.rows_per_part for record in records.values()) else version
    return dump_object({"format_version": version, "files": files} | ({"partial": True} if partial else {}))


def read_manifest(folder: Path, *, limit: int | None = None) -> Manifest:
    """Read a folder's manifest.json, file name -> record; limit: values that it may hold."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / MANIFEST).exists() and not (folder / MANIFEST).is_symlink():
        raise CheckpointError(
            f"{folder} has no {MANIFEST} that it could be checked against: te-models writes one into each of its "
            "folders; a second folder may be named to compare it with"
        )
    manifest = _read(folder, limit)
    if not manifest:
        raise CheckpointError(f"{MANIFEST} has no 'files'")
    return manifest


def _read(folder: Path, limit: int | None = None, manifest: str = MANIFEST) -> Manifest:
    values = read_object(plain_file(folder, manifest), manifest, limit=limit)
    version, files, partial = values.get("format_version"), values.get("files"), values.get("partial", False)
    if type(version) is not int or version not in _VERSIONS:
        raise CheckpointError(
            f"{manifest} has format_version {shown_untrusted(version)}; this release reads versions 1 to 3"
        )
    if not isinstance(files, dict):
        raise CheckpointError(f"{manifest} has no 'files'")
    if not isinstance(partial, bool):
        raise CheckpointError(f"{manifest} has partial = {shown_untrusted(partial)}; allowed: true, false")
    for name in files:
        if not all(map(is_file_name, name.split("/"))):
            raise CheckpointError(f"{manifest} names the file {quote(name)}, which is not a plain file name")
    records = {name: from_dict(name, entry, manifest) for name, entry in files.items()}
    if version < 3 and any(record.rows_per_part for record in records.values()):
        raise CheckpointError(f"{manifest} has rows_per_part, which format_version {version} has not")
    return Manifest(records, partial=partial)


def is_manifest(folder: Path) -> bool:
    """Whether a folder's manifest.json is one of ours, damaged or not: other programs write files of that name."""
    path = folder / MANIFEST
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return False
    text = plain_file(folder, MANIFEST).read_bytes()
    return b'"sha256"' in text or b'"format_version"' in text


def to_dict(record: FileRecord) -> dict[str, Any]:
    """Return a record as JSON values."""
    values: dict[str, Any] = {"digest": record.digest} if record.digest else {"sha256": record.sha256}
    values |= {"bytes": record.size}
    values |= {"header": record.header} if record.header else {}
    values |= {"rows_per_part": record.rows_per_part} if record.rows_per_part else {}
    return values | ({"tensors": record.tensors} if record.tensors or record.digest else {})


def from_dict(name: str, entry: Any, manifest: str = MANIFEST) -> FileRecord:
    """Return the record of a file from JSON values; anything else raises CheckpointError."""
    kind = "digest" if isinstance(entry, dict) and "digest" in entry else "sha256"
    if not isinstance(entry, dict) or not isinstance(entry.get(kind), str) or type(entry.get("bytes")) is not int:
        raise CheckpointError(f"{manifest} describes {quote(name)} by something other than sha256 and bytes")
    if not 0 <= entry["bytes"] < 1 << 63:
        raise CheckpointError(f"{manifest} says that {quote(name)} has {shown_untrusted(entry['bytes'])} bytes")
    tensors, header = entry.get("tensors", {}), entry.get("header", "")
    if not isinstance(tensors, dict) or not all(isinstance(digest, str) for digest in tensors.values()):
        raise CheckpointError(f"{manifest} does not map the tensors of {quote(name)} to their sha256")
    if not isinstance(header, str):
        raise CheckpointError(f"{manifest} describes the header of {quote(name)} by something other than its sha256")
    rows = entry.get("rows_per_part", 0)
    if "rows_per_part" in entry and (type(rows) is not int or rows != ROWS_PER_PART):
        raise CheckpointError(
            f"{manifest} has rows_per_part {shown_untrusted(rows)} for {quote(name)}; allowed: {ROWS_PER_PART}"
        )
    if kind == "sha256":
        return FileRecord(entry["sha256"], entry["bytes"], tensors, header, rows_per_part=rows)
    if "sha256" in entry or not all(map(_SHA256.fullmatch, (entry["digest"], header, *tensors.values()))):
        raise CheckpointError(f"{manifest} describes {quote(name)} by something other than the digests of its parts")
    return FileRecord("", entry["bytes"], tensors, header, entry["digest"], rows)


def check_joint_digest(name: str, record: FileRecord, tensors: Iterable[str], manifest: str = MANIFEST) -> None:
    """Raise CheckpointError where the digest of a weight file is not made of the digests of its header and its tensors,
    named in the order of their data."""
    if record.digest and record.digest != joint_digest(record.header, (record.tensors[tensor] for tensor in tensors)):
        raise CheckpointError(
            f"the digest of {name} in {manifest} is not made of the digests of its parts; it was changed"
        )


def may_be_edited(folder: Path, name: str) -> bool:
    """Whether a file decides no number of a model, in a folder of Hugging Face's kind: a tokenizer, a template, a
    licence. Of our own folders every file is as it was written."""
    if name in _STRICT or name.endswith(".safetensors"):
        return False
    try:
        return read_object(plain_file(folder, "config.json"), "config.json").get("model_type") != "te_models"
    except CheckpointError:
        return False


def note_edited(folder: Path, names: Iterable[str]) -> None:
    """Warn of files that `may_be_edited`, and were."""
    for name in names:
        text = f"{folder}: {quote(name)} is not as {MANIFEST} lists it; a file that decides no number may be edited"
        warnings.warn(text, EditedFileWarning, stacklevel=3)


def check_manifest(folder: str | Path, *, progress: Callable[[int, int], None] | None = None) -> int:
    """Check every file and tensor that manifest.json lists, and that there are no others; return how many files are
    as listed.

    Files whose names begin with a dot are no part of a folder. Of a Hugging Face folder, files that decide no number
    may have been added, edited or removed: an EditedFileWarning names each.

    Raises:
        CheckpointError: names the files that are not listed, or the first file that is not as listed and which of its
            tensors are damaged.
    """
    folder = Path(folder)
    records = read_manifest(folder)
    editable = {name for name in (*records, *_names(folder)) if may_be_edited(folder, name)}
    paths = {
        name: file_inside(folder, name, MANIFEST)
        for name in records
        if name not in editable or (folder / name).exists() or (folder / name).is_symlink()
    }
    unlisted = sorted(name for name in _names(folder) if name not in records and name != MANIFEST)
    if records.partial:
        unlisted = [name for name in unlisted if name == INDEX or name.endswith(".safetensors")]
    edited = [name for name in records if name not in paths] + [name for name in unlisted if name in editable]
    unlisted = [name for name in unlisted if name not in editable]
    if unlisted:
        raise CheckpointError(f"{folder} holds what {MANIFEST} does not list: {shorten(unlisted)}")
    total, done = sum(record.size for record in records.values()), 0

    def moved(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for name, path in paths.items():
        size = path.stat().st_size
        if size != records[name].size and name not in editable:
            raise CheckpointError(f"{name} has {size} bytes and {MANIFEST} says {records[name].size}")
    with Lane() as lane:
        for name, path in paths.items():
            record = records[name]
            if name in editable:
                if path.stat().st_size != record.size or file_digest(path) != record.sha256:
                    edited.append(name)
                continue
            if record.of_weights:
                found = record_of(path, lane, moved, **_kinds(record))
            else:
                found = FileRecord(file_digest(path), record.size)
            _check_record(name, record, found)
    note_edited(folder, edited)
    return len(records.keys() - edited)


def _kinds(record: FileRecord) -> dict[str, Any]:
    """Return what `record_of` takes for digests of the same kinds as `record` has."""
    return {"whole": bool(record.sha256), "rows_per_part": record.rows_per_part}


def _names(folder: Path) -> Iterator[str]:
    """List what a folder holds: files by name, those among its chat templates by `additional_chat_templates/NAME`."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.name == TEMPLATES and path.is_dir():
            yield from (f"{TEMPLATES}/{inner.name}" for inner in path.iterdir() if not inner.name.startswith("."))
        else:
            yield path.name


def _check_record(name: str, record: FileRecord, found: FileRecord, manifest: str = MANIFEST) -> None:
    """Raise CheckpointError, naming the damaged tensors, where a file is not as listed."""
    differing = [t for t in {**record.tensors, **found.tensors} if record.tensors.get(t) != found.tensors.get(t)]
    header = bool(record.header) and record.header != found.header
    if (found.sha256, found.digest) == (record.sha256, record.digest) and not differing and not header:
        return
    if record.digest and not differing and not header:
        check_joint_digest(name, record, found.tensors, manifest)
    what = "it" if not record.of_weights else f"tensor {shorten(differing)}" if differing else "its header"
    raise CheckpointError(f"{name} does not have the SHA-256 that {manifest} says; {what} was changed or damaged")


def record_files(paths: Mapping[str, Path], *, like: Mapping[str, FileRecord] | None = None) -> dict[str, FileRecord]:
    """Return the records of files as they are now, by the names given; records of safetensors files list their tensors.

    like: records by the same names, of an earlier release perhaps, whose kinds of digests safetensors files get.
    """
    records = {}
    with Lane() as lane:
        for name, path in paths.items():
            if path.suffix != ".safetensors":
                records[name] = FileRecord(file_digest(path), path.stat().st_size)
            else:
                records[name] = record_of(path, lane, **({} if like is None else _kinds(like[name])))
    return records


def check_listed(
    folder: Path, paths: Mapping[str, Path], *, read: Mapping[str, Path] | None = None, manifest: str = MANIFEST
) -> None:
    """Check that the manifest of `folder` describes exactly these files, every byte of them, and says nothing else.

    paths: name in the manifest -> the file, known to be a regular one. read: the files whose bytes
    are read, where other readers check the others; None: all. manifest: the name of its file.

    Raises:
        CheckpointError: names the first file that is not as listed, and which of its tensors are damaged.
    """
    records = _read(folder, manifest=manifest)
    differing = [name for name in {**records, **paths} if (name in records) != (name in paths)]
    if differing:
        raise CheckpointError(f"{manifest} lists other files than there should be: {shorten(differing)}")
    for name, path in paths.items():
        size = path.stat().st_size
        if size != records[name].size:
            raise CheckpointError(f"{name} has {size} bytes and {manifest} says {records[name].size}")
    found = records | record_files(paths if read is None else read, like=records)
    for name, record in records.items():
        _check_record(name, record, found[name], manifest)
    if plain_file(folder, manifest).read_bytes() != manifest_bytes(found):  # every byte of it counts, too
        raise CheckpointError(f"{manifest} is not as te-models writes it; it was changed or damaged")
