"""What machine this is, and the folder where what was measured or compiled on it is kept."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path


def cache_folder() -> Path:
    """Return where what is made once per machine is kept: `TE_MODELS_CACHE`, or ~/.cache/te_models."""
    return Path(os.environ.get("TE_MODELS_CACHE") or Path.home() / ".cache" / "te_models").expanduser()


def cpu_name() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name", "CPU part") or platform.processor()


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
