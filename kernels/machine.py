"""What machine this is, and the folder where what was measured or compiled on it is kept."""

import contextlib
import functools
import os
import platform
from pathlib import Path


class NoCacheFolderError(ValueError):
    """There is no folder to keep anything in; the message says why, in one sentence."""


def cache_folder() -> Path:
    """Return where what is made once per machine is kept: `TE_MODELS_CACHE`, or ~/.cache/te_models.

    Raises NoCacheFolderError for a relative path. It would mean another folder in each directory, and code that lies in
    a downloaded folder would run.
    """
    asked = os.environ.get("TE_MODELS_CACHE")
    try:
        folder = Path(asked or "~/.cache/te_models").expanduser()
    except RuntimeError:
        folder = Path()
    if folder.is_absolute():
        return folder
    if asked:
        raise NoCacheFolderError(f"TE_MODELS_CACHE is {asked!r}; allowed: an absolute path")
    raise NoCacheFolderError("there is no home directory to keep files in; TE_MODELS_CACHE may name a folder")


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone. Raises OSError."""
    if not folder.parent.exists():
        make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise


def cpu_name() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name", "CPU part") or platform.machine()


@functools.cache
def instruction_sets() -> str:
    """Return the names of the processor's instruction sets, or where the system does not list them, its name: code for
    one processor may not run on one with others."""
    return _cpuinfo("flags", "Features") or cpu_name()


def _cpuinfo(*keys: str) -> str:
    """Return the value of the first line of /proc/cpuinfo that begins with one of the keys, or ""."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(keys):
                return line.partition(":")[2].strip()
    return ""
