"""The gated delta rule (arXiv 2412.06464), with a decay for each head (GDN) or for each channel of keys (KDA)."""

from .op import gated_delta_rule, l2_normed

__all__ = ["gated_delta_rule", "l2_normed"]
