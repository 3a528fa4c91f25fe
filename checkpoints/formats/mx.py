"""Microscaling formats: a power-of-two scale byte per 32 values of a row (OCP MX specification v1.0).

    mxfp4 (gpt-oss)        X_blocks U8 [.., M, K/32, 16]    X_scales U8 [.., M, K/32]    value = e2m1 * 2^(scale - 127)
    mxfp8                  X.weight F8_E4M3 [M, K]          X.weight_scale_inv U8 [M, K/32]
    compressed-tensors     X.weight_packed U8 [M, K/2], or X.weight; X.weight_scale U8 [M, K/32]

E4M3 has all values of E2M1, so MXFP4 is held as MXFP8 with the same scales; or as NVFP4 (`mxfp4_as_nvfp4.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.quantize import e8m0_to_float
from te_models.kernels.quantize.nvfp4.reference import round_e2m1
from te_models.layers.quantizer import MXFP8Quantizer, NVFP4Quantizer, Quantizer
from te_models.layers.quantizer.encoding import Encoding, RowsByGroup, Scale, Uses

from .format import BYTE_SCALES, Part, WeightFormat, is_e4m3, one_of
from .fp8 import E4M3

_ROWWISE = MXFP8Quantizer(columnwise=False)


class MXFP4Quantizer(MXFP8Quantizer):
    """Values of E2M1, held as E4M3, with the scales of MXFP4: the form in which MXFP8 storage holds it.

    The scale of a block is 2^(floor(log2 amax) - 2) and larger values become 6 (OCP MX specification v1.0, section
    6.3), so numbers that were MXFP4 come back as they were.
    """

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding:
        columns = x.shape[-1]
        blocks = F.pad(x.float(), (0, -columns % 32)).unflatten(-1, (-1, 32))
        exponent = (blocks.abs().amax(-1).view(torch.int32) >> 23) & 255
        scales = (exponent - 2).clamp(0, 254).to(torch.uint8)
        scaled = (blocks / e8m0_to_float(scales)[..., None]).clamp(-6.0, 6.0)
        values = round_e2m1(scaled).flatten(-2)[..., :columns]
        return Encoding({"rowwise_data": values.to(torch.float8_e4m3fn), "rowwise_scale_inv": scales})


def mxfp4_format(name: str, data: str, scale: str, *, grouped: bool) -> WeightFormat:
    """Return the format of packed E2M1 with a scale byte per 32."""
    return WeightFormat(
        name=name,
        element="e2m1",
        parts=(
            Part("data", data, ("U8",), "elements", (1, 2), grouped=16 if grouped else None),
            Part("scale_inv", scale, BYTE_SCALES, "scale", (1, 32)),
        ),
        storages={"mxfp8": _ROWWISE},
        then={"nvfp4": NVFP4Quantizer(columnwise=False)},
        takes=lambda q: _takes(q) and isinstance(q, MXFP8Quantizer) and not q.two_dimensional,
        requantizer=MXFP4Quantizer(columnwise=False),
        columns=32 if grouped else 2,
    )


def mxfp8_format(name: str, scale: str) -> WeightFormat:
    """Return the format of E4M3 with a scale byte per 32."""
    return WeightFormat(
        name=name,
        element="e4m3",
        parts=(
            Part("data", "", ("F8_E4M3",), "elements", (1, 1)),
            Part("scale_inv", scale, BYTE_SCALES, "scale", (1, 32)),
        ),
        storages={"mxfp8": _ROWWISE},
        takes=_takes,
    )


def _takes(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, MXFP8Quantizer) and quantizer.rowwise and is_e4m3(quantizer)


def read_mxfp4(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format of gpt-oss's files."""
    return mxfp4_format("mxfp4", "_blocks", "_scales", grouped=True)


def read_mxfp8(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that transformers calls mxfp8."""
    one_of(config, "fmt", E4M3, "e4m3")
    return mxfp8_format("mxfp8", "_scale_inv")


def write(method: str, unquantized: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for a model whose linear modules `unquantized` are not quantized."""
    return {"quant_method": method, "modules_to_not_convert": unquantized}
