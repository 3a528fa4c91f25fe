"""The generated parts of the documentation are current."""

import functools
import re
from pathlib import Path

import pytest

from docs.generate import ROOT, defined_in, fill, package_tree, pages
from tests.structure.tree import packages

generated = functools.cache(pages)


@pytest.mark.parametrize(
    "page",
    [
        "docs/cli.md",
        "docs/layout.md",
        "docs/model-keys.md",
        "docs/porting.md",
        "docs/support.md",
        "docs/training-keys.md",
    ],
)
def test_generated_parts_are_current(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == generated()[ROOT / page], "run: make docs"


def test_the_tree_names_every_folder_with_a_phrase() -> None:
    lines = package_tree().splitlines()[1:-1]
    assert len([line for line in lines if "/ " in line]) == len(packages()) + 1  # and kernels/cpp
    assert [line for line in lines if not re.fullmatch(r" *\w+/ {2,}[\w`].*\.", line)] == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 10_000


def test_the_readme_counts_the_published_models() -> None:
    from te_models.catalogue.entries import names

    assert f"| {len(names())} published models by name" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_fill_needs_its_markers() -> None:
    page = "a\n<!-- begin x -->\n{}<!-- end x -->\nb"
    assert fill(page.format("old\n"), "x", "new") == page.format("new\n")
    with pytest.raises(ValueError, match="'y'"):
        fill("<!-- begin x -->\n<!-- end x -->", "y", "new")


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h)).strip().lower().replace(" ", "-")
        for h in headings
    }


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_a_row_of_the_layout_page_names_the_file_that_defines_its_answer() -> None:
    assert defined_in("kernels/gemm/choice.py", "choose_gemm") == "kernels/gemm/choice.py"
    for file, name in (("kernels/gemm/choice.py", "router_topk"), ("kernels/gemm/chosen.py", "choose_gemm")):
        with pytest.raises(ValueError, match=f"{file} does not define {name}"):
            defined_in(file, name)


def test_files_that_the_layout_page_names_exist() -> None:
    page = (ROOT / "docs/layout.md").read_text(encoding="utf-8").partition("## Where is")[2]
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []


def test_no_line_of_a_document_is_longer_than_people_read() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 200
    ]
    assert long == []
