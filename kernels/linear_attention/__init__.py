"""Linear attention with a scalar decay for each head: lightning attention (arXiv 2401.04658), where it is fixed, and
what state spaces are made of."""

from .op import linear_attention

__all__ = ["linear_attention"]
