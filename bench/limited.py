"""A benchmark as it runs on a CPU that has AVX2 alone, on one that has more.

    python -m bench.limited NAME [ARGUMENT ...]

oneDNN, MKL and ATen are told by their environment; our C++ functions are compiled for Haswell, by a compiler that the
environment names. Caches, memory and clock stay this machine's, which the result says: "limited_to".
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from te_models.kernels.machine import cache_folder, make_private

LIMIT = "avx2"
VARIABLE = "TE_MODELS_BENCH_LIMITED_TO"
_LIBRARIES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def environment() -> dict[str, str]:
    """Return what is set for a process that is limited."""
    return _LIBRARIES | {VARIABLE: LIMIT, "CXX": str(_compiler())}


def _compiler() -> Path:
    """Return a command that compiles for Haswell, whatever processor its options name before."""
    there = shutil.which("g++")
    if there is None:
        sys.exit("a limited benchmark needs g++")
    file = cache_folder() / "bench" / "g++-haswell"
    make_private(file.parent)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(f'#!/bin/sh\nexec {there} "$@" -march=haswell\n')
    beside.chmod(0o700)
    beside.replace(file)
    return file


def main() -> None:
    name, *arguments = sys.argv[1:]
    os.environ.update(environment())
    os.execv(sys.executable, [sys.executable, "-m", f"bench.{name}", *arguments])


if __name__ == "__main__":
    main()
