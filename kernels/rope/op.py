"""Public rotary embedding. The reference is what runs: eager on any device, fused by Inductor under torch.compile."""

from .frequencies import rope_frequencies
from .reference import apply_rope, rope_tables

__all__ = ["apply_rope", "rope_frequencies", "rope_tables"]
