"""Suggest the allowed name that a misspelt one was probably meant to be.

A leaf module: it imports nothing of the project.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 3


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'name'?" for the allowed names nearest to `word`, or "" where none is near.

    Of dotted names, those that end in the word come first: "--lr" is "--optimizer.lr".
    """
    names, text = list(allowed), str(word)
    same_end = [name for name in names if _end(name) == _end(text)]
    near = same_end or difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    if not near:
        ends = difflib.get_close_matches(_end(text), {_end(name) for name in names}, n=1, cutoff=0.6)
        near = [name for name in names if _end(name) in ends]
    return f"; did you mean {' or '.join(map(repr, near[:_MOST]))}?" if near else ""


def _end(name: str) -> str:
    """Return the last part of a dotted name, without the dashes of an option."""
    return name.lstrip("-").rpartition(".")[2]
