"""FP8 moments of an optimizer on CPU, read and rounded in one C++ pass each, with the bits of the definitions."""

from .library import available, decode_moments, encode_moments

__all__ = ["available", "decode_moments", "encode_moments"]
