"""Linear attention with a scalar decay for each head: lightning attention (arXiv 2401.04658), where it is fixed, and
what state spaces are made of."""

from .op import lightning_attention, linear_attention

__all__ = ["lightning_attention", "linear_attention"]
