"""The progress line: what it says, and that it is only for people."""

from __future__ import annotations

import io
import sys
import time

import pytest

from te_models.cli.progress import byte_progress, progress_text
from te_models.sizes import format_size


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


def test_a_terminal_sees_a_line_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    clock = iter([100.0, 101.0, 101.01, 102.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with byte_progress("import") as report:
        for done in (1 << 30, 2 << 30, 4 << 30):
            report(done, 4 << 30)
    lines = terminal.getvalue().split("\r")
    assert lines == [
        "import: 1.0 GiB of 4.0 GiB, 25%, 1.0 GiB/s, 0:03 left\x1b[K",
        "import: 4.0 GiB of 4.0 GiB, 100%, 2.0 GiB/s, 0:00 left\x1b[K",
        "\x1b[K",
    ]


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", text := io.StringIO())
    with byte_progress("import") as report:
        report(1, 2)
    assert text.getvalue() == ""
