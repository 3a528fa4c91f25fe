"""Repository settings that other checks rely on."""

import re
import subprocess
import warnings

import pytest
from _pytest.config import parse_warning_filter

from tests.structure.tree import ROOT, pyproject


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))


def test_warnings_are_errors() -> None:
    options = pyproject()["tool"]["pytest"]["ini_options"]
    assert options["filterwarnings"][0] == "error" and options["xfail_strict"] is True
    assert "--strict-markers" in options["addopts"]


ON_A_GPU = [
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations (Triggered",
    "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context...",
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting",
    "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction. Cut an issue to PyTorch",
]
"""What torch 2.11 says where there is a GPU, of itself and for our information."""


@pytest.mark.parametrize("message", ON_A_GPU)
def test_warnings_that_only_a_gpu_brings_are_no_errors(message: str) -> None:
    with warnings.catch_warnings():
        for line in pyproject()["tool"]["pytest"]["ini_options"]["filterwarnings"]:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))
        warnings.warn(message, UserWarning, stacklevel=1)


def test_readme_shows_the_two_commands_and_ci_runs_one() -> None:
    commands = re.findall(r"^make \S+", text("README.md"), flags=re.MULTILINE)
    assert {"make quickstart", "make test"} <= set(commands)
    assert {c.removeprefix("make ") for c in commands} <= targets()
    script = text(".ci/run")
    assert "set -euo pipefail" in script
    assert re.search(r"^make site\b.*\nexec make test\b", script, flags=re.MULTILINE)


def test_make_has_the_promised_targets() -> None:
    assert {"quickstart", "test", "test-all", "lint", "typecheck", "bench", "docs"} <= targets()


def test_make_pins_torch_in_every_install() -> None:
    """Otherwise a dependency could replace torch by the newest build."""
    installs = [line for line in text("Makefile").splitlines() if "$(PIP) install" in line]
    assert len(installs) >= 4 and all("$(PIN)" in line or "--no-deps" in line for line in installs)


def test_no_generated_files_are_tracked() -> None:
    if not (ROOT / ".git").exists():
        return  # an unpacked source archive has no index to look at
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert not re.search(r"__pycache__|\.egg-info|^build/|^dist/|^\.venv", tracked, flags=re.MULTILINE)
