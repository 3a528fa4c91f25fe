"""Write a complete checkpoint folder: weights, configuration, tokenizer files, manifest; atomically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .atomic import FINISHED, check_destination, check_not_above, check_space, new_folder
from .checkpoint import Checkpoint
from .conversion_report import REPORT
from .errors import CheckpointError
from .manifest import MANIFEST, manifest_bytes
from .meter import Progress
from .moved_report import moved_report
from .plan import Plan
from .resume import Journal, job_of
from .shards import MAX_SHARD_BYTES, split_shards
from .store import FileStore, Store
from .te_folder import CONFIG
from .weight_files import plain_file
from .writer import write_small_file, write_weights

SIDECARS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
)
"""Files that travel with the weights, unchanged, in both directions: the tokenizer's and the image processor's."""

_MAX_SIDECAR_BYTES = 256 << 20


def write_folder(
    destination: Path,
    plan: Plan,
    store: Store,
    config: bytes,
    *,
    sidecars_from: Path | None,
    files: FileStore | None = None,
    extra: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Carry out a plan. The destination appears complete or not at all, and an existing one stays until then.

    files: what the store reads. What a killed or interrupted run of the same plan over the same files has finished is
        kept; None: the tensors are not in files, and nothing is kept. extra: further small files, name -> content.
    """
    if sidecars_from is not None and files is not None:
        check_not_above(sidecars_from, destination)
    check_destination(destination, overwrite=overwrite)
    sidecars = _find_sidecars(sidecars_from)
    shards = split_shards(plan, max_shard_bytes)
    check_space(destination, plan.total_bytes)
    job = None if files is None else job_of(shards, files, config)
    before = None if files is None else files.state()
    with new_folder(destination, overwrite=overwrite, job=job) as folder:
        journal = None if job is None else Journal(folder.parent / FINISHED, plan.report)
        records = write_weights(folder, shards, store, journal=journal, progress=progress)
        if files is not None and files.state() != before:
            raise CheckpointError("the source files changed while they were read; convert them again")
        for name, path in sidecars.items():
            records[name] = write_small_file(folder / name, path.read_bytes())
        if plan.report is not None:
            records[REPORT] = write_small_file(folder / REPORT, plan.report.to_bytes())
        for name, data in (extra or {}).items():
            records[name] = write_small_file(folder / name, data)
        records[CONFIG] = write_small_file(folder / CONFIG, config)
        write_small_file(folder / MANIFEST, manifest_bytes(records))


def write_conversion(
    ckpt: Checkpoint,
    destination: Path,
    plan: Plan,
    config: bytes,
    *,
    store: Store | None = None,
    extra: Mapping[str, bytes] | None = None,
    overwrite: bool,
    max_shard_bytes: int,
    progress: Progress | None,
    dry_run: bool,
) -> Plan:
    """Carry out the plan of a conversion of `ckpt`, whose tokenizer files travel along; return it with its report.

    store: what the plan reads, where that is not the checkpoint's own.
    """
    if plan.report is None:
        plan = replace(plan, report=moved_report(plan, ckpt.tensors))
    if not dry_run:
        ckpt.check_values()
        write_folder(
            destination,
            plan,
            store or ckpt.store,
            config,
            sidecars_from=ckpt.path,
            files=ckpt.files,
            extra=extra,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
    return plan


def _find_sidecars(folder: Path | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    if folder is None:
        return found
    for name in SIDECARS:
        if (folder / name).exists() or (folder / name).is_symlink():
            path = plain_file(folder, name)
            if path.stat().st_size > _MAX_SIDECAR_BYTES:
                raise CheckpointError(
                    f"{name} of {folder} has {path.stat().st_size} bytes, too many for a tokenizer file"
                )
            found[name] = path
    return found
