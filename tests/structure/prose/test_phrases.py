"""Prose can be read aloud to a stranger: phrases that hide the noun they mean have a budget that only falls."""

import re

from tests.structure.prose.test_named_things import prose
from tests.structure.test_docs import PAGES
from tests.structure.tree import modules

MOST = {
    "of its own": (17, 11),
    "of their own": (6, 7),
    "anew": (3, 4),
    "so many": (8, 1),
    "is none": (16, 2),
    "that of": (38, 8),
    "those of": (21, 22),
    ", which": (93, 160),
}
"""Phrase: how often docstrings and comments of the packages have it at most, and how often documents."""


def count(phrase: str, texts: list[str]) -> int:
    """How often texts have a phrase as whole words, across the ends of lines as well."""
    pattern = re.compile(r"(?<!\w)" * phrase[0].isalpha() + r"\s+".join(map(re.escape, phrase.split(" "))) + r"\b")
    return sum(len(pattern.findall(text)) for text in texts)


def test_phrases_that_hide_a_noun_become_fewer() -> None:
    code = [prose(file) for file in modules().values()]
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    found = {phrase: (count(phrase, code), count(phrase, pages)) for phrase in MOST}
    assert {phrase: n for phrase, n in found.items() if n[0] > MOST[phrase][0] or n[1] > MOST[phrase][1]} == {}
    assert count("of its own", ["a scale\n    of its own", "of its owner"]) == 1
    assert count(", which", ["rows, which\nmove", "rows which move"]) == 1
