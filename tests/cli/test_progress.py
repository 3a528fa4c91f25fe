"""The progress of conversions: what it says, and that it is only for people."""

import io
import sys
import time

import pytest

from te_models.cli.progress import byte_progress, part_progress, progress_text
from te_models.sizes import format_size
from tests.cli.test_terminal import Terminal, without_rich


def test_text() -> None:
    gib = 1 << 30
    assert progress_text(0, 4 * gib, 0.0) == "0 bytes of 4.0 GiB, 0%, 0 bytes/s"
    assert progress_text(gib, 4 * gib, 10.0) == "1.0 GiB of 4.0 GiB, 25%, 102.4 MiB/s, 0:30 left"
    assert progress_text(gib, 1000 * gib, 10.0) == "1.0 GiB of 1,000.0 GiB, 0%, 102.4 MiB/s, 2:46:30 left"
    assert progress_text(0, 0, 1.0) == "0 bytes of 0 bytes, 100%, 0 bytes/s"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), ((1 << 30) - 1, "1.0 GiB")],
)
def test_sizes_are_in_powers_of_1024(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_a_terminal_sees_a_bar_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="draws the bar (extra train)")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with byte_progress("import") as report:
        report(1 << 30, 4 << 30)
        report(4 << 30, 4 << 30)
    assert "import" in terminal.getvalue() and "4.0/4.0 GiB" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # up one line, which is erased


def test_a_terminal_without_rich_sees_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rich(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    clock = iter([100.0, 105.0, 110.0, 111.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with byte_progress("import") as report:
        for done in (1 << 30, 2 << 30, 4 << 30):
            report(done, 4 << 30)
    assert terminal.getvalue() == "import: 2.0 GiB of 4.0 GiB, 50%, 204.8 MiB/s, 0:10 left\n"


def test_parts_of_a_work_have_a_bar_or_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="draws the bar (extra train)")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with part_progress("rehearsal") as report:
        report(3, 40, "KL of mxfp8")
    assert "3/40" in terminal.getvalue() and "KL of mxfp8" in terminal.getvalue()
    without_rich(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    clock = iter([100.0, 105.0, 111.0, 112.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with part_progress("rehearsal") as report:
        report(1, 40, "training with bf16, seed 0")
        report(2, 40, "training with bf16, seed 1")
    assert terminal.getvalue() == "rehearsal: 2 of 40: training with bf16, seed 1\n"


@pytest.mark.parametrize(("stream", "kind"), [(io.StringIO, "xterm"), (Terminal, "dumb")])
def test_files_and_terminals_without_a_cursor_see_nothing_that_moves(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], kind: str
) -> None:
    monkeypatch.setattr(sys, "stderr", text := stream())
    monkeypatch.setenv("TERM", kind)
    with byte_progress("import") as report:
        report(1, 2)
    with part_progress("rehearsal") as report_part:
        report_part(1, 2, "")
    assert text.getvalue() == ""
