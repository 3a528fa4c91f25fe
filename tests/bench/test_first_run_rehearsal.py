"""A GPU's first run on a CPU, as where nothing but torch, triton and transformers is installed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import torch

from bench.commit import ROOT
from bench.gpu.first_run.plan import PARTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build here")

_THERE = ("torch", "triton", "transformers", "safetensors", "numpy", "setuptools", "pip")
_SITE = """
import sys

_HIDDEN = {hidden!r}

class _Without:
    def __init__(self, finder):
        self._finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in _HIDDEN else self._finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = map(_Without, sys.meta_path)
"""


def requirements(names: tuple[str, ...]) -> set[str]:
    """Return distributions and what they require, and so on; names with dashes, in lower case."""
    found: set[str] = set()
    waiting = [_plain(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        waiting += [_plain(re.match(r"[\w.-]+", text)[0]) for text in required if "extra ==" not in text]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bare_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that hide all other packages; folder: where the hiding code lies."""
    there = requirements(_THERE)
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not {_plain(owner) for owner in owners} & there and not module.startswith(("te_models", "__editable__"))
    }
    assert {"pytest", "_pytest", "hypothesis"} <= hidden and "torch" not in hidden
    (folder / "sitecustomize.py").write_text(_SITE.format(hidden=hidden), encoding="utf-8")
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST")}
    return kept | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


IMPORTS = """
import importlib, importlib.util, sys
assert importlib.util.find_spec("pytest") is None and importlib.util.find_spec("triton")
for module in {modules!r}:
    importlib.import_module(module)
from tests.kernels.triton import interpreter, op_samples
from tests.bench import on_triton
from tests.te_models import fake_gpu
found = sorted({{name.partition(".")[0] for name in sys.modules}} & {{"pytest", "hypothesis", "rich", "matplotlib"}})
assert not found, found
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = bare_environment(folder) | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_imports_where_nothing_else_is_installed(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", IMPORTS.format(modules=[part.module for part in PARTS]))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the first run itself runs")
def test_the_whole_run_finds_nothing_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(tmp_path, "-m", "bench.gpu.first_run", "--rehearse", "--out", str(out))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    found = json.loads((out / "first_run.json").read_text())
    assert [part["part"] for part in found["parts"]] == [part.name for part in PARTS]
    for part in found["parts"]:
        assert part["ran"] and not part["wrong"] and "cut_off" not in part
    assert done.stdout.splitlines()[-1].startswith("written to") and "nothing is wrong" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel is not the interpreter's")
def test_a_wrong_kernel_is_named_with_its_input(tmp_path: Path) -> None:
    """A rotation that turns the wrong way, in the source of the kernel."""
    (tmp_path / "wrong").mkdir()
    patch = "from te_models.kernels.rope import triton as t\nright = t.rope\n"
    patch += "t.rope = lambda x, cos, sin, interleaved, inverse: right(x, cos, sin, interleaved, not inverse)\n"
    code = f"{patch}import sys\nfrom bench.gpu.first_run.worker import main\nsys.exit(main(sys.argv[1:]))"
    (tmp_path / "log").touch()
    done = run(tmp_path, "-c", code, "bench.gpu.first_run.kernels", "--log", str(tmp_path / "log"), "--rehearse")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    wrong = {line["case"]: line["wrong"] for line in lines if "wrong" in line}
    (case,) = wrong
    assert case.startswith("rope 0: float32[2, 3, 2, 10]") and "values differ, the first at" in wrong[case]
