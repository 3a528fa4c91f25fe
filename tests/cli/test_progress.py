"""The progress line: what it says, and that it is only for people."""

from __future__ import annotations

import io
import sys
import time

import pytest

from te_models.cli.progress import byte_progress, progress_text


def test_text() -> None:
    assert progress_text(0, 4_000_000_000, 0.0) == "0.00 of 4.00 GB, 0%, 0 MB/s"
    assert progress_text(10**9, 4 * 10**9, 10.0) == "1.00 of 4.00 GB, 25%, 100 MB/s, 0:30 left"
    assert progress_text(10**9, 10**12, 10.0) == "1.00 of 1000.00 GB, 0%, 100 MB/s, 2:46:30 left"
    assert progress_text(0, 0, 1.0) == "0.00 of 0.00 GB, 100%, 0 MB/s"


def test_a_terminal_sees_a_line_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    clock = iter([100.0, 101.0, 101.01, 102.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with byte_progress("import") as report:
        for done in (10**9, 2 * 10**9, 4 * 10**9):
            report(done, 4 * 10**9)
    lines = terminal.getvalue().split("\r")
    assert lines == [
        "import: 1.00 of 4.00 GB, 25%, 1000 MB/s, 0:03 left\x1b[K",
        "import: 4.00 of 4.00 GB, 100%, 2000 MB/s, 0:00 left\x1b[K",
        "\x1b[K",
    ]


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", text := io.StringIO())
    with byte_progress("import") as report:
        report(1, 2)
    assert text.getvalue() == ""
