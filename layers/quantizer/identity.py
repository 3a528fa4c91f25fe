"""No quantization: the operand in high precision, for a recipe that leaves some operands alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand

from .base import Fields, Parts, Quantizer, Usage
from .group_offsets import GroupOffsets
from .value import derived, value_class


@value_class
@dataclass(frozen=True, kw_only=True)
class IdentityQuantizer(Quantizer):
    """Keep x in its own dtype; as an operand it is in the compute dtype. Fields: rowwise_data [..., R, C]."""

    FORMAT: ClassVar[str] = "identity"
    PARTS: ClassVar[tuple[str, ...]] = ("data",)
    KEEPS_VALUES: ClassVar[bool] = True

    @derived
    def symmetric(self) -> bool:
        return True

    @derived
    def block(self) -> None:
        return None

    def part_dtype(self, part: str) -> torch.dtype | None:
        return None

    def operand(self, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None) -> Operand:
        return Operand(x.to(self.gemm_dtype(dtype)), None)

    def _quantize(self, x: Tensor, usage: Usage, key: Tensor | None, amax: Tensor | None = None) -> Parts:
        # a copy that later writes to x do not reach
        return (x.clone(),)

    def _dequantize(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Tensor:
        return parts[0].to(dtype)

    def quantize_rows(
        self, x: Tensor, m_splits: Tensor, key: Tensor | None = None, usages: Sequence[Usage] | None = None
    ) -> Fields:
        return {"rowwise_data": x.clone()}

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return GroupOffsets.of(m_splits, shape[0]).zero_outside(fields["rowwise_data"]).to(dtype)

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
