"""The C++ of all libraries under the sanitizers of addresses and of undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
CALLS = 3_000
FUZZ = f"""
import warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from tests.kernels.fast_paths.test_fuzz import fuzz
report = fuzz({CALLS}, 2)
assert not report.failures, report.failures[:5]
"""
TESTS = ("tests/kernels/fast_paths/test_moments.py", "tests/kernels/fast_paths/test_refused.py")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["fuzz", "tests"])
def test_no_library_leaves_its_memory_or_the_language(run: str, tmp_path: Path) -> None:
    """Compiled with the sanitizers, which end the process at the first fault, into a cache of its own."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no g++ on Linux here")
    libraries = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if None in libraries:
        pytest.skip("g++ has no sanitizers here")
    own = {
        "CXX": f"{compiler} {FLAGS}",
        "TE_MODELS_CACHE": str(tmp_path),
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # the interpreter's own are many
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    what = ["-c", FUZZ] if run == "fuzz" else ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    options = {"cwd": ROOT, "env": os.environ | own, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, *what], **options)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    assert list(tmp_path.rglob("*.so")), "no library was compiled with them"


def _library(compiler: str, name: str) -> Path | None:
    """Return where the compiler has a library of its own."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return path if path.is_absolute() and path.exists() else None
