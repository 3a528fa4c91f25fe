"""The table of environments: what a run adds to it, and that it covers what the project claims."""

import re
import sys

from packaging.requirements import Requirement
from packaging.version import Version

from docs.support import COLUMNS, TESTS, counts, environment, recorded, table, with_row
from tests.structure.tree import ROOT, pyproject

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes" />
<testcase classname="a" name="skips"><skipped /></testcase>
<testcase classname="a" name="fails"><failure /></testcase>
<testcase classname="a" name="ends badly" />
<testcase classname="a" name="ends badly"><error /></testcase>
</testsuite></testsuites>"""
AGAIN = """<testsuites><testsuite>
<testcase classname="a" name="fails" />
<testcase classname="b" name="passes" />
</testsuite></testsuites>"""


def row(**changed: str | int) -> dict:
    versions = {"python": "3.12.1", "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0"}
    return {**versions, "device": "CPU", "part": "all", **counts(REPORT), "date": "2026-11-21", **changed}


def test_every_test_counts_once_with_its_latest_outcome() -> None:
    assert counts(REPORT) == {"passed": 1, "failed": 2, "skipped": 1}
    assert counts(REPORT, AGAIN) == {"passed": 3, "failed": 1, "skipped": 1}


def test_a_run_replaces_the_row_of_its_environment_only() -> None:
    rows = [row()]
    for other in ({"torch": "2.9.1"}, {"part": "tests/kernels"}, {"device": "a GPU"}, {"python": "3.11.7"}):
        rows = with_row(rows, row(**other))
    assert len(rows) == 5
    again = with_row(rows, row(failed=0, passed=3, date="2026-11-22"))
    assert len(again) == 5
    assert [(r["torch"], r["python"]) for r in again[:2]] == [("2.9.1", "3.12.1"), ("2.11.0+cu130", "3.11.7")]
    assert [r["failed"] for r in again].count(0) == 1


def test_the_table_has_every_column() -> None:
    header, _, line = table([row()]).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == list(COLUMNS)
    assert line == "| 3.12.1 | 2.11.0+cu130 | 3.6.0 | 5.17.0 | CPU | all | 1 | 2 | 1 | 2026-11-21 |"


def test_the_environment_is_this_one() -> None:
    import torch

    found = environment("all")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == torch.__version__ and set(found) < set(COLUMNS)


def test_what_is_recorded_is_what_make_test_runs() -> None:
    assert f'-m "{TESTS}"' in (ROOT / "Makefile").read_text(encoding="utf-8")


def clean() -> list[dict]:
    """The environments in which nothing failed; their `part` says how much ran."""
    return [r for r in recorded() if not r["failed"]]


def test_every_python_that_is_claimed_has_passed() -> None:
    claimed = set(re.findall(r"Python :: (3\.\d+)", "\n".join(pyproject()["project"]["classifiers"])))
    assert claimed <= {r["python"].rpartition(".")[0] for r in clean()}


def test_the_oldest_torch_that_is_claimed_has_passed() -> None:
    (torch,) = [r for r in map(Requirement, pyproject()["project"]["dependencies"]) if r.name == "torch"]
    (oldest,) = torch.specifier
    assert oldest.operator == ">="
    assert Version(oldest.version).release in {Version(r["torch"]).release[:2] for r in clean()}


def test_the_recorded_parts_are_tests_that_exist() -> None:
    parts = [name.partition("::") for row in recorded() for name in row["part"].split() if name.startswith("tests/")]
    assert len(parts) > 10 and [file for file, _, _ in parts if not (ROOT / file).exists()] == []
    for file, _, name in parts:
        assert not name or f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), name
