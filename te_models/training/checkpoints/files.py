"""The folders of training checkpoints: their names, which there are and which go, and what is in a sharded one."""

from __future__ import annotations

import shutil
from pathlib import Path

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.weight_files import plain_file

from .checks import NAME, PARTS, VALUES


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints, oldest first. Their names say that they were complete when they were written; what has
    happened to them since, `load_state` finds out."""
    found = []
    for folder in (output_dir / "checkpoints").glob("step-*"):
        match = NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def latest_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    return (list_checkpoints(output_dir) or [None])[-1]


def remove_old(output_dir: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints (0: none), and what killed runs have left."""
    checkpoints = list_checkpoints(output_dir)
    for old in checkpoints[:-keep_last] if keep_last else []:
        # Renamed first: a kill during the removal must not leave half a checkpoint under a complete one's name.
        old.rename(old.with_name(f".{old.name}.removed"))
    for leftover in (output_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover)


def sharded_paths(folder: Path) -> dict[str, Path]:
    """Return what manifest.json of a sharded checkpoint lists. Raises CheckpointError for what is no regular file."""
    parts = folder / PARTS
    if parts.is_symlink() or not parts.is_dir():
        raise CheckpointError(f"{folder} has no folder {PARTS}")
    names = sorted(path.name for path in parts.iterdir() if not path.name.startswith("."))
    return {VALUES: plain_file(folder, VALUES)} | {f"{PARTS}/{name}": plain_file(parts, name) for name in names}
