"""Which source a result was measured with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def commit(root: Path = ROOT) -> dict[str, Any]:
    """Return {"commit": hash, "changed": the files that differ from it, results of benchmarks left out}; where that
    cannot be known, {"commit": None, "why": the reason}."""
    try:
        head = _git(root, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        changed = _git(root, "status", "--porcelain", "--untracked-files=normal", "--", ".", ":!bench/results")
    except FileNotFoundError:
        return {"commit": None, "why": "git is not installed"}
    except subprocess.CalledProcessError as error:
        return {"commit": None, "why": error.stderr.strip().splitlines()[0]}
    if Path(head[0]).resolve() != root.resolve():  # an archive of the source inside another project
        return {"commit": None, "why": "the source is not a checkout of its own"}
    return {"commit": head[1], "changed": [line[3:] for line in changed.splitlines()]}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


AT_START = commit()
"""Asked for once and early: a long benchmark does not notice what is committed while it runs."""
