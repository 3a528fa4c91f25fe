"""Norms, rotations, activations and sums of rows in eager code on CPU, in one C++ pass each."""

from .rows import activate_rows, apply_rope, rms_norm, sum_slots

__all__ = ["activate_rows", "apply_rope", "rms_norm", "sum_slots"]
