"""The folders of training checkpoints: their names, those that exist, those that go, and what is in a sharded one."""

import re
import shutil
from pathlib import Path

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.weight_files import plain_file

from .checks import NAME, PARTS, VALUES

INDEX = "index.safetensors"
"""Of a sharded checkpoint, in its folder of parts."""
_SUFFIXES = (".safetensors", ".json")
_PART = re.compile(r"(rank-[0-9]{5,})\.(?:safetensors|json)")


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


def digests_of(file: str) -> str:
    """Return the name of the list of digests of a rank's file, beside it."""
    return file.removesuffix(".safetensors") + ".json"


def part_files(folder: Path) -> list[str]:
    """Return the names of the files of ranks, each of which has a list of digests; none for a checkpoint of an earlier
    release, whose manifest lists everything. Raises CheckpointError where a list has no file, or a file no list."""
    names = _part_names(folder)
    if INDEX not in names:
        return []
    ranks = {match[1] for name in names if (match := _PART.fullmatch(name))}
    for missing in (f"{rank}{suffix}" for rank in sorted(ranks) for suffix in _SUFFIXES):
        if missing not in names:
            raise CheckpointError(f"{folder} lacks {PARTS}/{missing}")
    return [f"{rank}.safetensors" for rank in sorted(ranks)]


def sharded_paths(folder: Path) -> dict[str, Path]:
    """Return what manifest.json of a sharded checkpoint lists. Raises CheckpointError for what is no regular file."""
    own = set(part_files(folder))
    names = [name for name in _part_names(folder) if name not in own]
    return {VALUES: plain_file(folder, VALUES)} | {f"{PARTS}/{n}": plain_file(folder / PARTS, n) for n in names}


def _part_names(folder: Path) -> list[str]:
    parts = folder / PARTS
    if parts.is_symlink() or not parts.is_dir():
        raise CheckpointError(f"{folder} has no folder {PARTS}")
    return sorted(path.name for path in parts.iterdir() if not path.name.startswith("."))
