"""A page of the design log says of each decision what, against what and why; figures stand in tables or in files."""

import re
from collections.abc import Iterator

from tests.structure.tree import ROOT

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "design").glob("*.md"))}
LISTS = {"index.md", "torch-versions.md"}
"""Pages that are one table."""
LISTED = {"The first minutes on a GPU", "What moved to `make test-all`", "What no change may move"}
"""Sections that list facts."""
MOST_NUMBERS = 8
"""Numbers of a paragraph or an item outside of tables: more are a table."""
NUMBER = re.compile(r"(?<![\w.,:^])-?\d[\d.,:^]*(?:e-?\d+)?")
RESULTS = {path.name for path in (ROOT / "bench" / "results").iterdir()}
WRITTEN = {"first_run.json"}
"""Files that commands write for users."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def incomplete(text: str) -> list[str]:
    """Return the decisions of a page that do not say What, Against and Why, in this order, once each."""
    _, *sections = re.split(r"^## ", without_code(text), flags=re.MULTILINE)
    found = {s.partition("\n")[0]: re.findall(r"^- \*\*(\w+):\*\* \S", s, flags=re.MULTILINE) for s in sections}
    return [title for title, said in found.items() if title not in LISTED and said != ["What", "Against", "Why"]]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and the items of lists, without what is in backticks and where links lead."""
    text = re.sub(r"^(?:\||#).*$", "", without_code(text), flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", text):
        yield re.sub(r"`[^`]*`|\]\([^)]*\)|^\s*\d+\. ", " ", paragraph)


def crowded(text: str) -> list[str]:
    """Return the paragraphs with too many numbers."""
    return [p.strip() for p in paragraphs(text) if len(NUMBER.findall(p)) > MOST_NUMBERS]


def test_each_decision_says_what_against_what_and_why() -> None:
    assert set(TEXTS) >= LISTS
    decided = {name: text for name, text in TEXTS.items() if name not in LISTS}
    assert {name: found for name, text in decided.items() if (found := incomplete(text))} == {}
    assert [name for name, text in decided.items() if "\n## " not in text] == []
    assert [title for title in LISTED if not any(f"\n## {title}\n" in text for text in decided.values())] == []


def test_figures_stand_in_tables() -> None:
    assert {name: found for name, text in TEXTS.items() if (found := crowded(text))} == {}


def test_results_that_are_named_exist() -> None:
    named = {name: re.findall(r"`(?:bench/results/)?([\w.]+\.(?:json|png))`", text) for name, text in TEXTS.items()}
    assert sum(map(len, named.values())) > 10
    assert {name: gone for name, found in named.items() if (gone := set(found) - RESULTS - WRITTEN)} == {}


def test_what_is_missing_or_crowded_is_found() -> None:
    decision = "- **What:** x.\n- **Against:** y.\n- **Why:** z.\n"
    assert incomplete(f"# A\n\n## B\n\n{decision}\n## C\n\n- **What:** x.\n- **Why:** z.\n") == ["C"]
    assert incomplete(f"## A\n\n{decision}\n```text\n## no decision\n```\n") == []
    numbers = " ".join(map(str, range(MOST_NUMBERS)))
    assert crowded(f"- {numbers} in `1 2` and [bf16](3.md)\n\n1. one\n\n| {numbers} | 1 |\n") == []
    assert crowded(f"{numbers} and -1e-3") == [f"{numbers} and -1e-3"]
