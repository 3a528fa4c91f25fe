"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint cannot be read, converted or written; the message is one sentence that names the file or the key."""


def quote(name: str) -> str:
    """Return a name that a stranger chose in quotes, cut where it is too long for a message."""
    return repr(name) if len(name) <= 120 else f"{name[:120]!r}..."


def shorten(names: Iterable[str], limit: int = 4) -> str:
    """Join names for a message: the first few, then how many more there are."""
    names = list(names)
    shown = ", ".join(quote(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
