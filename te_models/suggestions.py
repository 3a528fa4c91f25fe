"""Suggest the allowed name that a misspelt one was probably meant to be.

A leaf module: it imports nothing of the project.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'name'?" for the allowed name nearest to `word`, or "" where none is near."""
    near = difflib.get_close_matches(str(word), list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
