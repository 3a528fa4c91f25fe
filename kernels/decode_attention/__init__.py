"""Attention of one query of each head to the keys of a cache, on CPU, at the speed at which memory is read."""

from .op import attend_one, uses_decode_attention

__all__ = ["attend_one", "uses_decode_attention"]
