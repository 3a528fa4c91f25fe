"""Run the tests of `make test` in this environment and record the result: `make support`.

A row of docs/support.json is one environment (versions of Python, torch, triton and transformers, and the device) with
what the tests said there; a later run in the same environment replaces it. `docs/generate.py` makes the table of the
README from the rows. A run that pytest did not finish is not recorded.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("support.json")
TESTS = "not slow and not real and not gpu"
FINISHED = (0, 1)
"""Exit codes of pytest after which every test has run: all passed, or some failed."""

Row = dict[str, Any]
ENVIRONMENT = ("python", "torch", "triton", "transformers", "device", "part")
COLUMNS = (*ENVIRONMENT, "passed", "failed", "skipped", "date")


def environment(part: str) -> Row:
    """The versions of this interpreter's packages, "none" where one is absent, the device, and which tests ran."""
    import torch

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: version(name) for name in ("triton", "transformers")}
    return {**versions, "device": device, "part": part}


def counts(junit: str) -> dict[str, int]:
    """Passed, failed and skipped tests of pytest's JUnit report; an error around a test counts as failed."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in ElementTree.fromstring(junit).iter("testsuite"):
        total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
        failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        found["failed"] += failed
        found["skipped"] += skipped
        found["passed"] += total - failed - skipped
    return found


def with_row(rows: list[Row], row: Row) -> list[Row]:
    """`rows` with `row` in place of an earlier one of the same environment, in the order of the table."""
    kept = [old for old in rows if any(old[key] != row[key] for key in ENVIRONMENT)]
    return sorted([*kept, row], key=lambda r: (_numbers(r["torch"]), _numbers(r["python"]), r["device"], r["part"]))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".") if part.isdigit()]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def recorded() -> list[Row]:
    """The rows recorded so far."""
    return json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else []


def main() -> int:
    """Run, record, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description="Run the tests of `make test` here and record the result.")
    parser.add_argument("paths", nargs="*", help="run and record this part only, such as tests/kernels")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default: 2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-n", str(options.workers), "--dist", "worksteal", "-m", TESTS]
        command += [f"--junitxml={junit}", *options.paths]
        code = subprocess.run(command, cwd=ROWS.parents[1], env=variables, check=False).returncode
        if code not in FINISHED:
            print(f"not recorded: pytest ended with exit code {code} before all tests had run", file=sys.stderr)
            return code
        found = counts(junit.read_text(encoding="utf-8"))
    row = {**environment(" ".join(options.paths) or "all"), **found, "date": f"{datetime.date.today()}"}
    ROWS.write_text(json.dumps(with_row(recorded(), row), indent=1) + "\n", encoding="utf-8")
    print(f"recorded in {ROWS.name}; `make docs` rewrites the table of the README")
    return code


if __name__ == "__main__":
    sys.exit(main())
