"""Quantizers of every class and option, by a short name."""

import torch

import te_models.layers.quantizer as quantizers
from te_models.layers.quantizer.delayed import DelayedScalingQuantizer

E5M2 = torch.float8_e5m2

EXAMPLES: dict[str, quantizers.Quantizer] = {
    "tensor": quantizers.Float8CurrentScalingQuantizer(),
    "tensor pow2": quantizers.Float8CurrentScalingQuantizer(fp8_dtype=E5M2, force_pow_2_scales=True, amax_epsilon=0.25),
    "1x128": quantizers.Float8BlockQuantizer(block_scaling_dim=1),
    "128x128 float32": quantizers.Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3),
    "1x32": quantizers.MXFP8Quantizer(),
    "32x32": quantizers.MXFP8Quantizer(two_dimensional=True, fp8_dtype=E5M2),
    "1x16": quantizers.NVFP4Quantizer(),
    "1x16 RHT": quantizers.NVFP4Quantizer(with_rht=True),
    "16x16": quantizers.NVFP4Quantizer(with_2d_quantization=True),
    "16x16 4/6": quantizers.NVFP4Quantizer(with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "int4 1x32": quantizers.Int4Quantizer(),
    "int4 rows": quantizers.Int4Quantizer(group_size=0, zero_points=True, scale_dtype=torch.float16),
    "int8 1x64": quantizers.Int8Quantizer(group_size=64, zero_points=True, scale_dtype=torch.float32),
    "identity": quantizers.IdentityQuantizer(),
    "hybrid": quantizers.HybridQuantizer(
        rowwise_quantizer=quantizers.MXFP8Quantizer(),
        columnwise_quantizer=quantizers.Float8BlockQuantizer(block_scaling_dim=1),
    ),
    "hybrid by rows": quantizers.HybridQuantizer(
        rowwise_quantizer=quantizers.NVFP4Quantizer(row_scaled_nvfp4=True),
        columnwise_quantizer=quantizers.NVFP4Quantizer(),
    ),
    "hybrid symmetric": quantizers.HybridQuantizer(
        rowwise_quantizer=quantizers.NVFP4Quantizer(with_2d_quantization=True),
        columnwise_quantizer=quantizers.Float8CurrentScalingQuantizer(),
    ),
}
STOCHASTIC = quantizers.NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
DELAYED = DelayedScalingQuantizer(fp8_dtype=E5M2)
