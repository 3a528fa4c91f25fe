"""No quantization: the operand in high precision, for a recipe that leaves some operands alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand

from .base import Quantizer
from .encoding import Encoding, Fields, RowsByGroup, Scale, Usage, Use, Uses
from .value import derived, value_class


@value_class
@dataclass(frozen=True, kw_only=True)
class IdentityQuantizer(Quantizer):
    """Keep x in its own dtype; as an operand it is in the compute dtype. Fields: rowwise_data [..., R, C]."""

    FORMAT: ClassVar[str] = "identity"
    PARTS: ClassVar[tuple[str, ...]] = ("data",)
    KEEPS_VALUES: ClassVar[bool] = True
    ENCODES_ROWS: ClassVar[bool] = True

    @derived
    def symmetric(self) -> bool:
        return True

    @derived
    def block(self) -> None:
        return None

    def part_dtype(self, part: str) -> torch.dtype | None:
        return None

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        if uses.traced:
            return None  # a graph stores x itself
        # a field of its own, which later writes to x do not reach
        fields: Fields = {"rowwise_data": x.clone()} if uses.stored else {}
        return Encoding(fields, None if uses.multiplied is None else Operand(x.to(self.gemm_dtype(uses.dtype)), None))

    def operand(self, fields: Fields, use: Use) -> Operand:
        return Operand(fields["rowwise_data"].to(self.gemm_dtype(use.dtype)), None)

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        return fields["rowwise_data"].to(dtype)

    def quantizes_rows(self, usage: Usage, align: int) -> bool:
        return False  # a GEMM takes the rows as they are

    def statistics(
        self, x: Tensor, key: Tensor | None = None, amax: Tensor | None = None, count: Tensor | None = None
    ) -> dict[str, Tensor]:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        largest = q.amax(x).amax() if x.numel() else one * 0
        return {"amax": largest, "scale_min": one, "scale_max": one, "underflow": one * 0, "saturation": one * 0}


UNQUANTIZED = IdentityQuantizer()
"""The quantizer of what is not quantized: a value, made once."""
