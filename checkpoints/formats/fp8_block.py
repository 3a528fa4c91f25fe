"""FP8 in 128x128 blocks, as DeepSeek-V3 introduced it (arXiv 2412.19437): `quant_method` "fp8".

    X.weight F8_E4M3 [M, K]    X.weight_scale_inv F32 or BF16 [M/128, K/128], rounded up    value = weight * scale

`scale_fmt` "ue8m0" promises scales that are powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_models.layers.quantizer import Float8BlockQuantizer, MXFP8Quantizer, Quantizer

from ..errors import CheckpointError
from .fields import one_of
from .format import FLOAT_SCALES, Part, WeightFormat, is_e4m3

BLOCK = (128, 128)


def blocks_128(*, name: str, scale_suffix: str, pow2: bool, activations: tuple[str, ...]) -> WeightFormat:
    """Return the format of E4M3 in 128x128 blocks with floating-point scales."""
    return WeightFormat(
        name=name,
        element="e4m3",
        parts=(
            Part("data", "", ("F8_E4M3",), "elements", (1, 1)),
            Part("scale_inv", scale_suffix, FLOAT_SCALES, "scale", BLOCK),
        ),
        storages={
            "float8_block": Float8BlockQuantizer(force_pow_2_scales=pow2),
            "mxfp8": MXFP8Quantizer(two_dimensional=True),
        },
        takes=lambda quantizer: _takes(quantizer, pow2),
        takes_even=lambda q: isinstance(q, MXFP8Quantizer) and q.two_dimensional and is_e4m3(q),
        activations=activations,
    )


def _takes(quantizer: Quantizer, pow2: bool) -> bool:
    if not isinstance(quantizer, Float8BlockQuantizer) or not is_e4m3(quantizer):
        return False
    return quantizer.block_scaling_dim == 2 and (quantizer.force_pow_2_scales or not pow2)


def read(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that `quantization_config` declares."""
    one_of(config, "fmt", ("e4m3",), "e4m3")
    if config.get("weight_block_size", list(BLOCK)) != list(BLOCK):
        raise CheckpointError(
            f"config.json declares FP8 with weight_block_size = {config['weight_block_size']}; supported: {list(BLOCK)}"
        )
    pow2 = one_of(config, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    return blocks_128(name="fp8", scale_suffix="_scale_inv", pow2=pow2, activations=("input_scale", "activation_scale"))


def has_power_of_two_scales(weight_format: WeightFormat) -> bool:
    """Whether the declaration promises scales that are powers of two."""
    return weight_format.storages["float8_block"] == Float8BlockQuantizer(force_pow_2_scales=True)


def write(plain: list[str], *, pow2: bool) -> dict[str, Any]:
    """Return `quantization_config` for a model whose linear modules `plain` are not quantized."""
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": plain,
    }
    return config | ({"scale_fmt": "ue8m0"} if pow2 else {})
