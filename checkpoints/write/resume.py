"""Go on where a killed conversion stopped.

The folder in which a conversion works (`atomic.py`) outlives a kill. Beside the content it holds

    job                     what is being written, from what: a digest of the plan and of the state of the source files
    finished/<file>.json    the record (size, digests) of every weight file that is complete and on the disk

A conversion that finds its own job there keeps the files whose content still has the recorded digests and writes the
others again; any other job is thrown away. The result equals a run without interruption, bit for bit.
"""

import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from te_models.sizes import format_size

from ..io.errors import CheckpointError
from ..io.hashing import FileRecord, Lane, record_of
from ..io.manifest import from_dict, to_dict
from ..io.store import FileStore
from ..io.strict_json import dump_object, read_object
from ..io.threads import ByteProgress, run_all
from ..mapping.report import ConversionReport
from .shards import Shard
from .shared_digests import SharedDigests

_BYTES_OF_A_PLAN = 1
"""To be raised by a change that makes the same plan give other bytes."""

log = logging.getLogger(__name__)


def job_of(shards: Sequence[Shard], files: FileStore, config: bytes) -> str:
    """Return the digest of everything that decides the bytes of a result.

    A source file counts as the same while its name, size and times of change are; its headers are in the plan.
    """
    digest = hashlib.sha256(json.dumps([_BYTES_OF_A_PLAN, files.state()]).encode() + config)
    for shard in shards:
        digest.update(json.dumps([shard.file, dict(shard.metadata)]).encode())
        for o in shard.outputs:
            digest.update(repr((o.name, o.dtype, o.shape, o.pieces, o.compute is None, o.variant)).encode())
    return digest.hexdigest()


class Journal:
    """The records of the finished files of one job."""

    def __init__(self, folder: Path, report: ConversionReport | None) -> None:
        """folder: where to keep the records; what is there is of the same job. report: its errors are kept, too."""
        self._folder, self._report = folder, report
        folder.mkdir(exist_ok=True)

    def add(self, shard: Shard, record: FileRecord) -> None:
        """Remember a file that is complete and on the disk."""
        partial = self._path(shard).with_suffix(".partial")
        errors = [] if self._report is None else self._report.errors()
        partial.write_bytes(dump_object({"file": to_dict(record), "errors": errors}))
        partial.rename(self._path(shard))

    def keep(
        self,
        content: Path,
        shards: Sequence[Shard],
        bytes_done: ByteProgress,
        at_once: int,
        *,
        file_digests: bool = False,
        shared: SharedDigests | None = None,
    ) -> dict[str, FileRecord]:
        """Return the records of the files in `content` that need not be written again; remove all others.

        file_digests: with the digests of whole files, whether the earlier run computed them or not. shared: gets the
        digests of the parts of the outputs in them, as they are read here.
        """

        def check(shard: Shard) -> FileRecord | None:
            record, errors = self._read(shard)
            path = content / shard.file
            if record is None or not path.exists() or not stat.S_ISREG(os.lstat(path).st_mode):
                return None
            parts: dict[str, bytes] = {}
            with Lane() as lane:
                try:
                    found = record_of(
                        path, lane, whole=file_digests, parts=None if shared is None else parts.__setitem__
                    )
                except CheckpointError:
                    return None
            if replace(found, sha256="", digest="") != replace(record, sha256="", digest=""):
                return None
            if shared is not None:  # only now: a file that was damaged is written again, and its parts come then
                for output, digests in parts.items():
                    shared.add(output, digests)
            if self._report is not None:
                self._report.note_errors(errors)
            bytes_done.add(shard.nbytes)
            return found

        checked = run_all(check, shards, at_once, bytes_done.stop)
        complete = {shard.file: record for shard, record in zip(shards, checked) if record is not None}
        for path in content.iterdir():
            if path.name in complete:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if complete:
            size = sum(shard.nbytes for shard in shards if shard.file in complete)
            log.warning(
                "continuing an interrupted run: %d of %d files (%s) are complete and kept",
                len(complete),
                len(shards),
                format_size(size),
            )
        return complete

    def _read(self, shard: Shard) -> tuple[FileRecord | None, list[float | None]]:
        try:
            values = read_object(self._path(shard))
            return from_dict(shard.file, values.get("file")), values["errors"]
        except (CheckpointError, KeyError):
            return None, []  # there is none, or it was cut short: the file is written again

    def _path(self, shard: Shard) -> Path:
        return self._folder / f"{shard.file}.json"
