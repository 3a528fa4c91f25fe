"""Write a complete checkpoint folder: weights, configuration, tokenizer files, manifest; atomically."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..folder.te_folder import CONFIG
from ..formats import SEPARATE
from ..io.atomic import FINISHED, new_folder
from ..io.destination import check_destination, check_in_place, check_not_above, check_place, check_space
from ..io.errors import CheckpointError
from ..io.manifest import MANIFEST, manifest_bytes
from ..io.store import FileStore, Store
from ..io.strict_json import parse_object
from ..io.threads import Progress
from ..io.weight_files import INDEX
from ..mapping.plan import ConversionPlan
from ..mapping.report import REPORT
from .resume import Journal, job_of
from .shards import MAX_SHARD_BYTES, split_shards
from .shared_digests import SharedDigests
from .sidecars import find_sidecars, note_left_behind
from .writer import write_small_file, write_weights

_REWRITTEN = (CONFIG, INDEX, MANIFEST, REPORT, SEPARATE)


def write_folder(
    destination: Path,
    plan: ConversionPlan,
    store: Store,
    config: bytes,
    *,
    sidecars_from: Path | None,
    files: FileStore | None = None,
    extra: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    dry_run: bool = False,
    file_digests: bool = False,
) -> ConversionPlan:
    """Carry out a plan; return it, with a note of the files beside the weights that are left behind.

    The destination appears complete or not at all, and an existing one stays until then.

    files: what the store reads. What a killed or interrupted run of the same plan over the same files has finished is
        kept; None: the tensors are not in files, and nothing is kept. extra: further small files, name -> content.
    dry_run: only check what can be checked before the first byte is written.
    file_digests: list the digest of each weight file that `sha256sum` prints in the manifest, see `FileRecord`.
    """
    check_place(destination)
    if sidecars_from is not None and files is not None:
        check_not_above(sidecars_from, destination)
    check_destination(destination, overwrite=overwrite)
    sidecars: dict[str, Path] = {}
    if sidecars_from is not None:
        sidecars = find_sidecars(sidecars_from, parse_object(config, CONFIG))
        if files is not None:
            copied = {name.partition("/")[0] for name in sidecars}
            check_in_place(sidecars_from, destination, {*files.metadata, *copied, *_REWRITTEN})
        plan = replace(plan, notes=plan.notes + note_left_behind(sidecars_from, sidecars))
    shards = split_shards(plan, max_shard_bytes)
    check_space(destination, plan.total_bytes)
    if dry_run:
        return plan
    job = None if files is None else job_of(shards, files, config)
    before = None if files is None else files.state()
    with new_folder(destination, overwrite=overwrite, job=job) as folder:
        shared = None if files is None else SharedDigests(files, store, plan.outputs)
        journal = None if job is None else Journal(folder.parent / FINISHED, plan.report)
        records = write_weights(
            folder, shards, store, journal=journal, shared=shared, progress=progress, file_digests=file_digests
        )
        if shared is not None:
            shared.check_complete()
        if files is not None:
            files.finish_checks()
        if files is not None and files.state() != before:
            raise CheckpointError("the source files changed while they were read; convert them again")
        for name, path in sidecars.items():
            (folder / name).parent.mkdir(exist_ok=True)
            records[name] = write_small_file(folder / name, path.read_bytes())
        if plan.report is not None:
            records[REPORT] = write_small_file(folder / REPORT, plan.report.to_bytes())
        for name, data in (extra or {}).items():
            records[name] = write_small_file(folder / name, data)
        records[CONFIG] = write_small_file(folder / CONFIG, config)
        write_small_file(folder / MANIFEST, manifest_bytes(records))
    return plan
