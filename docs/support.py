"""Run the tests of `make test` in this environment and record the result: `make support`.

A row of docs/support.json is one environment (versions of Python, torch, triton and transformers, and the device) with
what the tests said there; a later run in the same environment replaces it. `docs/generate.py` makes the table of
docs/support.md from the rows. A run that pytest did not finish is not recorded.
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


def counts(*reports: str) -> dict[str, int]:
    """Passed, failed and skipped tests of pytest's JUnit reports, oldest first: a test's latest outcome counts.

    An error before or after a test counts as a failure of it.
    """
    latest: dict[tuple[str, str], str] = {}
    for report in reports:
        found: dict[tuple[str, str], str] = {}
        for case in ElementTree.fromstring(report).iter("testcase"):
            test = case.attrib["classname"], case.attrib["name"]
            children = {child.tag for child in case}
            outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
            found[test] = "failed" if "failed" in (outcome, found.get(test)) else outcome
        latest |= found
    outcomes = list(latest.values())
    return {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}


def with_row(rows: list[Row], row: Row) -> list[Row]:
    """`rows` with `row` in place of an earlier one of the same environment, in the order of the table."""
    kept = [old for old in rows if any(old[key] != row[key] for key in ENVIRONMENT)]
    return sorted([*kept, row], key=lambda r: (_numbers(r["torch"]), _numbers(r["python"]), r["device"], r["part"]))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".") if part.isdigit()]


def _cell(value: object) -> str:
    """Return a cell of the table: of many parts of the tests, how many, and where."""
    parts = str(value).split(" ")
    if len(parts) < 5:
        return str(value)
    return f"{len(parts)} parts of {'/'.join(parts[0].split('/')[:2])}"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def recorded() -> list[Row]:
    """The rows recorded so far."""
    return json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else []


def run(paths: list[str], workers: int) -> tuple[int, str]:
    """Run the tests; return pytest's exit code and its JUnit report, empty where not all tests were run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "-m", TESTS]
        command += [f"--junitxml={report}", *paths]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROWS.parents[1], env=variables, check=False).returncode
        return code, report.read_text(encoding="utf-8") if code in FINISHED else ""


def main() -> int:
    """Run, record, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description="Run the tests of `make test` here and record the result.")
    parser.add_argument("paths", nargs="*", help="run and record this part only, such as tests/kernels")
    parser.add_argument("--workers", type=int, default=3, help="processes that run tests (default: 3)")
    parser.add_argument(
        "--report",
        action="append",
        type=Path,
        help="read a report that pytest --junitxml wrote in this environment instead of running; may be repeated, "
        "oldest first: a test that ran again counts with its latest outcome",
    )
    options = parser.parse_args()
    if options.report:
        code, reports = 0, [path.read_text(encoding="utf-8") for path in options.report]
    else:
        code, report = run(options.paths, options.workers)
        if not report:
            print(f"not recorded: pytest ended with exit code {code} before all tests had run", file=sys.stderr)
            return code
        reports = [report]
    versions = environment(" ".join(options.paths) or "all")
    row = {**versions, **counts(*reports), "date": f"{datetime.date.today()}"}
    ROWS.write_text(json.dumps(with_row(recorded(), row), indent=1) + "\n", encoding="utf-8")
    print(f"recorded in {ROWS.name}; `make docs` rewrites the table of the README")
    return code


if __name__ == "__main__":
    sys.exit(main())
