"""Transformer Engine's arguments of quantizers: their constructors take them from here on.

A quantizer is a value that the compiler knows by its class, so that there is one class of each format and none on the
porch: what is added is what the constructors take.
"""

from __future__ import annotations

from typing import Any

from ..quantizer import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from .arguments import DType, takes_also, takes_at_default, takes_without_effect

AMAX_REDUCTION: dict[str, Any] = {"with_amax_reduction": False, "amax_reduction_group": None}
"""Here the parts of a matrix share an amax under FSDP2, see `share_scales`."""

_current = takes_at_default(**AMAX_REDUCTION)(Float8CurrentScalingQuantizer.__init__)
Float8CurrentScalingQuantizer.__init__ = takes_without_effect("device", position=2)(_current)  # type: ignore[method-assign]

_mxfp8 = takes_also(with_2d_quantization="two_dimensional")(MXFP8Quantizer.__init__)
MXFP8Quantizer.__init__ = _mxfp8  # type: ignore[method-assign]

_nvfp4 = takes_at_default(**AMAX_REDUCTION, fp4_dtype=DType.kFloat4E2M1)(NVFP4Quantizer.__init__)
# an amax is always taken of the transformed matrix
NVFP4Quantizer.__init__ = takes_without_effect("with_post_rht_amax")(_nvfp4)  # type: ignore[method-assign]
