"""The generated parts of the documentation are current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import ROOT, fill, package_tree, pages
from tests.structure.tree import packages


@pytest.mark.parametrize(
    "page", ["docs/cli.md", "docs/layout.md", "docs/model-keys.md", "docs/support.md", "docs/training-keys.md"]
)
def test_generated_parts_are_current(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == pages()[ROOT / page], "run: make docs"


def test_the_tree_names_every_folder_with_a_phrase() -> None:
    lines = package_tree().splitlines()[1:-1]
    assert len([line for line in lines if "/ " in line]) == len(packages())
    assert [line for line in lines if not re.fullmatch(r" *\w+/ {2,}[\w`].*\.", line)] == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 10_000


def test_fill_needs_its_markers() -> None:
    page = "a\n<!-- begin x -->\n{}<!-- end x -->\nb"
    assert fill(page.format("old\n"), "x", "new") == page.format("new\n")
    with pytest.raises(ValueError, match="'y'"):
        fill("<!-- begin x -->\n<!-- end x -->", "y", "new")


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / Path(link)).exists(), f"{page.name} links to {link}"
