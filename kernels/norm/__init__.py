"""RMSNorm and LayerNorm over the last dimension."""

from .op import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
