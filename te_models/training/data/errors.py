"""What goes wrong with data: one error, and how its sentences list names."""

from collections.abc import Iterable
from typing import Any


class DataError(ValueError):
    """A data set is missing, damaged or does not fit the request; the message is one sentence."""


def first_names(names: Iterable[Any]) -> str:
    """Return the first ten names, for errors."""
    found = [str(name) for name in names]
    return ", ".join(found[:10]) + (" and more" if len(found) > 10 else "") if found else "none"
