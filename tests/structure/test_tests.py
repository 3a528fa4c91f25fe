"""Tests read as a specification: every file says first what it claims, or what it is for."""

from __future__ import annotations

import ast

from tests.structure.tree import ROOT


def test_every_file_begins_with_a_docstring() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 300
    assert [str(file) for file in files if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))] == []
