"""Integers of four or eight bits with a scale per group of a row: what weights alone are stored as (W4A16, W8A16)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand
from te_models.kernels.gemm.few_rows import IntegerOperand
from te_models.kernels.quantize.integers.reference import (
    dequantize_integers,
    pack_nibbles,
    quantize_integers,
    unpack_nibbles,
)
from te_models.suggestions import check_choice, shown

from .base import Quantizer
from .encoding import WHOLE_ROW, Encoding, Fields, RowsByGroup, Scale, Schema, Use, Uses
from .value import derived, value_class

_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class IntQuantizer(Quantizer):
    """Base of quantizers to integers, of weights whose GEMMs take the dequantized values.

    group_size: values of a row that share a scale, a power of two from 8; 0: all of the row. zero_points: whether every
    group has a zero point; else codes are symmetric around 2^(bits - 1). scale_dtype: of the scales, torch.bfloat16,
    torch.float16 or torch.float32. ValueError for others.

    No recipe computes in integers: a layer whose weight is stored so runs without a recipe, forward and the gradient of
    its input, with the values that the one stored copy stands for.
    """

    BITS: ClassVar[int]
    BLOCK_SCALES_ONLY: ClassVar[bool] = True
    SIGNED_SCALES: ClassVar[bool] = True

    group_size: int = 32
    zero_points: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.group_size
        if size != 0 and (size < 8 or size & (size - 1)):
            raise ValueError(f"group_size is {shown(size)}; allowed: 0 for whole rows, and powers of two from 8")
        check_choice("scale_dtype", self.scale_dtype, _SCALE_DTYPES)

    @derived
    def PARTS(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("data", "scale_inv", "zero_point") if self.zero_points else ("data", "scale_inv")

    @derived
    def symmetric(self) -> bool:
        return True

    @derived
    def block(self) -> tuple[int, int]:
        return (1, self.group_size or WHOLE_ROW)

    @derived
    def _columnwise_block(self) -> tuple[int, int]:
        return self.block  # the one copy serves both usages as it lies

    def of_transpose(self) -> Quantizer | None:
        return None  # the one copy lies along its rows

    def part_dtype(self, part: str) -> torch.dtype | None:
        return self.scale_dtype if part == "scale_inv" else torch.uint8

    def largest(self) -> float:
        return 2.0 ** (self.BITS - 1)

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding:
        size = self.group_size or max(1, x.shape[-1])
        codes, scale_inv, zero = quantize_integers(x, self.BITS, size, self.scale_dtype, zero_points=self.zero_points)
        data = pack_nibbles(codes) if self.BITS == 4 else codes
        return Encoding(self.named((data, scale_inv) if zero is None else (data, scale_inv, zero), ("rowwise",)))

    def operand(self, fields: Fields, use: Use) -> Operand:
        return Operand(self.dequantize_fields(fields, self.gemm_dtype(use.dtype), use.shape), None)

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        data, scale_inv = fields["rowwise_data"], fields["rowwise_scale_inv"]
        if self.BITS == 4:
            if shape is None:
                raise ValueError("packed fields do not tell their matrix's shape; pass shape, [..., rows, columns]")
            data = unpack_nibbles(data, shape[-1])
        zero = fields["rowwise_zero_point"] if self.zero_points else None
        return dequantize_integers(data, scale_inv, zero, self.BITS, self.block[1], dtype)

    def integer_operand(self, fields: Fields, shape: Sequence[int]) -> IntegerOperand:
        """Return stored fields of matrices [..., R, C] as a CPU multiplies few rows by them."""
        names, columns = ("data", "scale_inv", "zero_point") if self.zero_points else ("data", "scale_inv"), shape[-1]
        parts = [fields[f"rowwise_{name}"].view(*shape[:-1], -1) for name in names]
        data, scale, zero = parts if self.zero_points else (*parts, None)
        return IntegerOperand(data, scale, zero, columns, self.BITS, min(self.group_size or WHOLE_ROW, max(1, columns)))

    @classmethod
    def _from_json(cls, field: str, value: Any) -> Any:
        if field != "scale_dtype":
            return value
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in _SCALE_DTYPES}
        check_choice("scale_dtype", value, dtypes)
        return dtypes[value]


@value_class
@dataclass(frozen=True, kw_only=True)
class Int4Quantizer(IntQuantizer):
    """Four bits, two codes in a byte.

    Fields: rowwise data uint8 [..., R, ceil(C/2)], scale_inv [..., R, ceil(C/group_size)] in scale_dtype, and with
    zero_points zero_point uint8 [..., R, ceil(C/group_size)].
    """

    FORMAT: ClassVar[str] = "int4"
    SCHEMA: ClassVar[Schema] = Schema(values_per_entry=2)
    BITS: ClassVar[int] = 4


@value_class
@dataclass(frozen=True, kw_only=True)
class Int8Quantizer(IntQuantizer):
    """Eight bits. Fields: as of `Int4Quantizer`, but data is uint8 [..., R, C]."""

    FORMAT: ClassVar[str] = "int8"
    BITS: ClassVar[int] = 8
