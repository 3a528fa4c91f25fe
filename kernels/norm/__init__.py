"""RMSNorm and LayerNorm over the last dimension, with the result in high precision or as FP8."""

from .op import layer_norm, rms_norm
from .quantized import Norm, layer_norm_quantized, rms_norm_quantized
from .reference import l2_norm, rms_norm_by

__all__ = ["Norm", "l2_norm", "layer_norm", "layer_norm_quantized", "rms_norm", "rms_norm_by", "rms_norm_quantized"]
