"""Rules that carry a state from token to token on a CPU, in C++: all tokens in chunks, in both passes, or one token."""

from . import step
from .op import run, serves

__all__ = ["run", "serves", "step"]
