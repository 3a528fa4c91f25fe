"""Weights stored as integers with a scale, and perhaps a zero point, per group of a row, as an operand of few rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...quantize.integers.reference import dequantize_integers, unpack_nibbles

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class IntegerOperand(NamedTuple):
    """Codes [..., N, K] and what they stand for, (code - zero) * scale; leading dimensions are the members of a grouped
    weight. data: uint8 [..., N, K], or two codes in a byte [..., N, ceil(K/2)]; scale_inv and zero_point (uint8, or
    None: the middle): [..., N, ceil(K/group)]. columns: K; bits: 4 or 8; group: columns that share a scale, at most K.
    """

    data: Tensor
    scale_inv: Tensor
    zero_point: Tensor | None
    columns: int
    bits: int
    group: int

    @property
    def outer(self) -> int:
        """N."""
        return self.data.shape[-2]

    @property
    def inner(self) -> int:
        """K."""
        return self.columns

    def member(self, g: int) -> IntegerOperand:
        """Return one matrix of a grouped operand."""
        zero = None if self.zero_point is None else self.zero_point[g]
        return self._replace(data=self.data[g], scale_inv=self.scale_inv[g], zero_point=zero)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`, computed in float32 and rounded once."""
        codes = unpack_nibbles(self.data, self.columns) if self.bits == 4 else self.data
        return dequantize_integers(codes, self.scale_inv, self.zero_point, self.bits, self.group, dtype)

    def fits(self) -> bool:
        """Whether the fields fit each other."""
        stored = self.columns if self.bits == 8 else -(-self.columns // 2)
        groups = (*self.data.shape[:-1], -(-self.columns // self.group)) if self.group > 0 else ()
        zero = self.zero_point
        return (
            self.bits in (4, 8)
            and self.data.dtype == torch.uint8
            and self.data.shape[-1] == stored
            and self.scale_inv.dtype in SCALE_DTYPES
            and self.scale_inv.shape == groups
            and (zero is None or (zero.dtype == torch.uint8 and zero.shape == groups))
        )

    def reason_against(self) -> str | None:
        """Return why a library cannot take the fields as they lie."""
        if self.group < self.columns and self.group % 32:
            return f"it is for groups of whole 32 columns, not of {self.group}"
        if not self.scale_inv.is_contiguous() or not (self.zero_point is None or self.zero_point.is_contiguous()):
            return "the scales are not contiguous"
        return None
