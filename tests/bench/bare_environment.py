"""What an environment with torch, triton and transformers alone has: everything else is hidden from a process and all
that it starts."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

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
        waiting += [_plain(re.match(r"[\w.-]+", text)[0]) for text in required if "extra ==" not in text]  # type: ignore[index]
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
