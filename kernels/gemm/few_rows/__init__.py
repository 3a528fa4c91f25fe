"""A few rows by a weight that is stored quantized, on CPU: decoded in registers, one or half a byte read per value."""

from .op import choose_stored, linear, serves

__all__ = ["choose_stored", "linear", "serves"]
