"""Where a new folder may go: all that can be known about it before its first byte is written."""

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from te_models.sizes import format_size

from .errors import CheckpointError, quote, shorten


def named(destination: Path) -> Path:
    """Return the path by its own name, so that the folder beside it is found: `.` and `..` have other parents."""
    return destination.resolve() if destination.name in ("", "..") else destination


def working_folder(destination: Path) -> Path:
    """Return the folder in which a new one is put together."""
    return destination.parent / f".{destination.name}.partial"


def check_place(destination: Path) -> None:
    """Raise CheckpointError where no folder can be, or one that cannot be given another's name."""
    try:
        os.lstat(working_folder(named(destination)))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{quote(str(destination))} cannot be written: {reason}") from None
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise CheckpointError(f"{destination} exists and is not a folder")
    if not destination.exists():
        return
    if os.path.ismount(destination):
        raise CheckpointError(f"{destination} is a mount point, which cannot be replaced; choose a folder inside it")
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return
    if destination.resolve() in (here, *here.parents):
        raise CheckpointError(
            f"{destination} is the current directory, or contains it, and cannot be replaced; choose a new folder"
        )


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError where `destination` may not be written."""
    check_place(destination)
    if destination.exists() and not overwrite:
        if not any(destination.iterdir()):
            return
        raise CheckpointError(f"{destination} exists; choose another destination or pass overwrite")


def check_not_above(source: Path, destination: Path) -> None:
    """Raise CheckpointError where replacing `destination` would remove the folder that is read along with its
    surroundings. The folder itself may be replaced: it stays until the new one is complete."""
    if destination.resolve() in source.resolve().parents:
        raise CheckpointError(f"{destination} contains the folder that is read; choose another destination")


def check_in_place(source: Path, destination: Path, known: Collection[str]) -> None:
    """Raise CheckpointError where `destination` is the folder that is read and has files that are not `known`:
    neither read nor copied, they would be gone."""
    if not (destination.exists() and destination.samefile(source)):
        return
    lost = sorted(path.name for path in source.iterdir() if path.name not in known)
    if lost:
        raise CheckpointError(
            f"{destination} is the folder that is read, and replacing it would remove {shorten(lost)}; choose another "
            "destination, or move them away first"
        )


def check_space(destination: Path, nbytes: int) -> None:
    """Raise CheckpointError if the disk of `destination` cannot hold `nbytes` more, less what a killed run left.

    The disk belongs to the folder around it, where the work is done.
    """
    destination = named(destination)
    around = next(path for path in destination.parents if path.exists())
    if not os.access(around, os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot write in {around}: it is read-only, or not yours")
    free = shutil.disk_usage(around).free
    left = 0
    for root, _, names in os.walk(working_folder(destination)):
        for name in names:
            with contextlib.suppress(OSError):  # another run is removing its own
                left += Path(root, name).lstat().st_blocks * 512
    if free + left < nbytes:
        raise CheckpointError(f"{destination} needs {format_size(nbytes)} and its disk has {format_size(free)} free")
