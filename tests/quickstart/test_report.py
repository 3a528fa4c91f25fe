"""The report: a bound that is not met fails, a NaN fails, an empty comparison fails."""

import json
import re
import time

import pytest

from te_models.quickstart.report import QuickstartReport, peak_rss_gib


@pytest.mark.parametrize(("value", "passed"), [(1.0, True), (2.0, True), (2.1, False), (float("nan"), False)])
def test_at_most(value: float, passed: bool) -> None:
    report = QuickstartReport(verbose=False)
    report.begin("1")
    report.at_most("x", value, 2.0)
    assert report.passed is passed


@pytest.mark.parametrize(("different", "of", "passed"), [(0, 3, True), (1, 3, False), (0, 0, False)])
def test_same(different: int, of: int, passed: bool) -> None:
    report = QuickstartReport(verbose=False)
    report.begin("1")
    report.same("x", different, of, "tensors")
    assert report.passed is passed


def test_a_report_without_checks_has_not_passed() -> None:
    assert QuickstartReport(verbose=False).passed is False


def test_table_and_dictionary(capsys: pytest.CaptureFixture[str]) -> None:
    report = QuickstartReport()
    report.begin("1 first")
    report.at_most("small", 0.5, 1.0)
    report.at_most("large", 2.0, 1.0)
    report.begin("2 second")
    report.same("files", 0, 7, "files")
    report.end()
    table = report.table().splitlines()
    assert table[0].split() == ["step", "checked", "measured", "required"]
    assert table[2].split() == ["1", "first", "small", "0.5", "<=", "1", "ok"]
    assert table[3].split() == ["large", "2", "<=", "1", "FAIL"] and "7 files equal" in table[4]
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["passed"] is False and [c["passed"] for c in values["checks"]] == [True, False, True]
    assert set(values["seconds"]) == {"1 first", "2 second"}
    assert 0.01 < values["peak_rss_gib"] == pytest.approx(peak_rss_gib(), abs=0.01)
    assert "FAIL large" in capsys.readouterr().out


def test_a_long_silence_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    report = QuickstartReport()
    report.begin("4 train")
    with report.heartbeat(0.05), report.working(lambda: "training in bf16: step 12 of 32"):
        until, told = time.monotonic() + 60, ""
        while "..." not in told and time.monotonic() < until:
            time.sleep(0.01)
            told += capsys.readouterr().out
    assert re.search(r"^  \.\.\. training in bf16: step 12 of 32, \d+ s$", told, re.MULTILINE), told
    with QuickstartReport(verbose=False).heartbeat(0.01):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""
