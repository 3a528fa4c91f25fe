"""Terminals for tests: a stream that says it is one, a real one for a process, and a te_models without rich."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pty
import subprocess
from typing import Any

import pytest


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let te_models find everything but rich."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name, *rest))


def on_a_terminal(command: list[str], **environment: str) -> tuple[int, str]:
    """Run a command whose three streams are a terminal; return its exit code and everything it prints."""
    control, terminal = pty.openpty()
    values: dict[str, Any] = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **environment}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=values)
    os.close(terminal)
    printed = b""
    with contextlib.suppress(OSError):  # what a terminal answers when its process has ended
        while part := os.read(control, 4096):
            printed += part
    os.close(control)
    return process.wait(), printed.decode()
