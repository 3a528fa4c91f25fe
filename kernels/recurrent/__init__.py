"""Rules that carry a state from token to token on a CPU, in C++: all tokens in chunks, in both passes, or one token."""

from . import step
from .op import run_recurrence, uses_recurrence

__all__ = ["run_recurrence", "step", "uses_recurrence"]
