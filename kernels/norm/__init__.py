"""RMSNorm and LayerNorm over the last dimension, with the result in high precision or as FP8."""

from .op import layer_norm, rms_norm
from .quantized import layer_norm_quantized, rms_norm_quantized

__all__ = ["layer_norm", "layer_norm_quantized", "rms_norm", "rms_norm_quantized"]
