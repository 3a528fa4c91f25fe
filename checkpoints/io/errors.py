"""The one error of this package."""

from collections.abc import Iterable

_LONGEST = 700
"""Characters of a message: nine lines of a terminal."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, converted or written; the message is one sentence that names the file or the key.

    The middle of a longer one is left out: names and values in it are a stranger's, as long as he likes, and its begin
    says what is wrong, its end what is allowed.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            half = (_LONGEST - 5) // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class UnreadError(CheckpointError):
    """Something about a tensor was asked of a store that has headers alone."""


class EditedFileWarning(UserWarning):
    """A small file of a Hugging Face folder is not the one that manifest.json lists: people edit these, and no number
    depends on them. The command line shows it as a note."""


def quote(name: str) -> str:
    """Return a name that a stranger chose in quotes, cut where it is too long for a message."""
    return repr(name) if len(name) <= 120 else f"{name[:120]!r}..."


def shown_untrusted(value: object) -> str:
    """Return a value that a stranger chose as Python would write it, cut where it is too long for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"  # Python refuses to write one of thousands
    text = repr(value[:120] if isinstance(value, str | list) else value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def shorten(names: Iterable[str], limit: int = 4) -> str:
    """Join names for a message: the first few, then how many more there are."""
    names = list(names)
    shown = ", ".join(quote(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
