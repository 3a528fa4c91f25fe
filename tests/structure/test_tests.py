"""Tests read as a specification: every file says first what it claims, or what it is for."""

from __future__ import annotations

import re
from collections import Counter

from tests.structure.tree import ROOT


def test_every_file_begins_with_a_docstring() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 300
    assert [str(file) for file in files if not re.match(r'"""\s*[^\s"]', file.read_text(encoding="utf-8"))] == []


def test_a_room_holds_at_most_twenty_files() -> None:
    """As in the package, whose rooms the tests' rooms mirror."""
    counts = Counter(file.parent for file in (ROOT / "tests").rglob("*.py"))
    assert {str(room): n for room, n in counts.items() if n > 20} == {}
