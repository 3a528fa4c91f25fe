"""Suggestions for misspelt names: the nearest allowed one, and of dotted names those with the same last part."""

import pytest

from te_models.suggestions import did_you_mean

OPTIONS = ["--steps", "--optimizer.lr", "--data.path", "--model.path", "--data.sequence-length", "--checkpoint.every"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--step", ["--steps"]),
        ("--lr", ["--optimizer.lr"]),
        ("--optimizer.lrr", ["--optimizer.lr"]),
        ("--path", ["--data.path", "--model.path"]),
        ("--sequence-lenght", ["--data.sequence-length"]),
        ("--colour", []),
    ],
)
def test_the_nearest_names_are_suggested(word: str, meant: list[str]) -> None:
    expected = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    assert did_you_mean(word, OPTIONS) == expected


def test_no_more_than_three_names_are_suggested() -> None:
    assert did_you_mean("x", [f"{table}.x" for table in "abcd"]) == "; did you mean 'a.x' or 'b.x' or 'c.x'?"
