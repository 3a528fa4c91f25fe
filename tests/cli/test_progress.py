"""The progress of conversions: what it says, and that it is only for people."""

from __future__ import annotations

import io
import sys
import time

import pytest

from te_models.cli.progress import byte_progress, progress_text
from tests.cli.terminals import Terminal, without_rich


def test_text() -> None:
    assert progress_text(0, 4_000_000_000, 0.0) == "0.00 of 4.00 GB, 0%, 0 MB/s"
    assert progress_text(10**9, 4 * 10**9, 10.0) == "1.00 of 4.00 GB, 25%, 100 MB/s, 0:30 left"
    assert progress_text(10**9, 10**12, 10.0) == "1.00 of 1000.00 GB, 0%, 100 MB/s, 2:46:30 left"
    assert progress_text(0, 0, 1.0) == "0.00 of 0.00 GB, 100%, 0 MB/s"


def test_a_terminal_sees_a_bar_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="draws the bar (extra train)")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with byte_progress("import") as report:
        report(10**9, 4 * 10**9)
        report(4 * 10**9, 4 * 10**9)
    assert "import" in terminal.getvalue() and "4.0/4.0 GB" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # up one line, which is erased


def test_a_terminal_without_rich_sees_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rich(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    clock = iter([100.0, 105.0, 110.0, 111.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with byte_progress("import") as report:
        for done in (10**9, 2 * 10**9, 4 * 10**9):
            report(done, 4 * 10**9)
    assert terminal.getvalue() == "import: 2.00 of 4.00 GB, 50%, 200 MB/s, 0:10 left\n"


@pytest.mark.parametrize(("stream", "kind"), [(io.StringIO, "xterm"), (Terminal, "dumb")])
def test_files_and_terminals_without_a_cursor_see_nothing_that_moves(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], kind: str
) -> None:
    monkeypatch.setattr(sys, "stderr", text := stream())
    monkeypatch.setenv("TERM", kind)
    with byte_progress("import") as report:
        report(1, 2)
    assert text.getvalue() == ""
