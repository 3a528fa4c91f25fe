"""Rotary position embedding: frequencies with their context extensions, angle tables, and the rotation."""

from .op import apply_rope, rope_frequencies
from .reference import rope_tables

__all__ = ["apply_rope", "rope_frequencies", "rope_tables"]
