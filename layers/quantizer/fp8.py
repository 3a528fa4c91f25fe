"""FP8 with one float32 scale per matrix, and the base of all FP8 quantizers."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize.cpu import fields as cpu_fields
from te_models.kernels.quantize.cpu import fields_op
from te_models.kernels.quantize.fp8.dequantize_grouped import dequantize_grouped
from te_models.suggestions import check_choice, shown

from .base import Quantizer
from .encoding import Encoding, Fields, NumberFormat, RowsByGroup, Scale, Usage, Use, Uses
from .value import derived, dtype_of_enum, value_class


@dataclass(frozen=True, kw_only=True)
class FP8Quantizer(Quantizer):
    """Base of quantizers to FP8. fp8_dtype, the first positional argument: torch.float8_e4m3fn or torch.float8_e5m2,
    or a name of an enum for one, else ValueError."""

    fp8_dtype: torch.dtype = field(default=torch.float8_e4m3fn, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fp8_dtype, enum.Enum):
            object.__setattr__(self, "fp8_dtype", dtype_of_enum(self.fp8_dtype))
        if self.fp8_dtype not in q.FP8_MAX:
            check_choice("fp8_dtype", self.fp8_dtype, q.FP8_MAX)

    def part_dtype(self, part: str) -> torch.dtype | None:
        return self.fp8_dtype if part == "data" else torch.float32

    def largest(self) -> float:
        return q.FP8_MAX[self.fp8_dtype]

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        usage = self._usage_in(fields)
        data, scale_inv = self._as_it_lies(fields[f"{usage}_data"], fields[f"{usage}_scale_inv"], usage)
        block = self.block if usage == "rowwise" else self._columnwise_block
        return dequantize_grouped(data, scale_inv, m_splits, shape[0], block, dtype)

    def _as_it_lies(self, data: Tensor, scale_inv: Tensor, usage: Usage) -> tuple[Tensor, Tensor]:
        return data, scale_inv

    @classmethod
    def _from_json(cls, field: str, value: Any) -> Any:
        if field != "fp8_dtype":
            return value
        dtypes = {str(d).removeprefix("torch."): d for d in q.FP8_MAX}
        check_choice("fp8_dtype", value, dtypes)
        return dtypes[value]


def quantize_by_scale(
    x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, *, measured: bool = False
) -> tuple[Fields, float | None]:
    """Return (the fields of x [..., R, C] times the scale of its matrix, the largest error, where it was measured).

    scale: float32 [...]. Eagerly on a CPU one C++ pass makes E4M3 of a matrix, of a NaN and elsewhere an operation.
    """
    scale_inv = torch.div(torch.ones_like(scale), scale)
    data, error = None, None
    if fp8_dtype is torch.float8_e4m3fn and cpu_fields.chosen(x) is Backend.COMPILED:
        found = cpu_fields.quantize_scaled(x, float(scale), float(scale_inv), measured=measured)
        if found is not None:
            data, error = found[0], found[1] if measured else None
    data = q.quantize_per_tensor(x, scale[..., None, None], fp8_dtype) if data is None else data
    return {"rowwise_data": data, "rowwise_scale_inv": scale_inv}, error


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless epsilon is finite and >= 0."""
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"amax_epsilon is {shown(epsilon)}; allowed: a finite number from 0 on")


class OneScale(NumberFormat):
    """What quantizers with one scale per matrix share, values and live ones; of rows every group has its own."""

    ENCODES_ROWS: ClassVar[bool] = True
    fp8_dtype: torch.dtype

    def scale_of_matrix(self, x: Tensor, scale: Scale) -> Tensor:
        """Return the scale of each matrix of x [..., R, C], [...]."""
        raise NotImplementedError

    def scale_of_groups(self, amax: Tensor) -> Tensor:
        """Return the scale of each group, [G], of these amaxes, [G]."""
        raise NotImplementedError

    def rounded_matrix(self, x: Tensor, dtype: torch.dtype) -> Operand:
        """Return x as the operand that it is, no quantized copy made; dtype: of the values."""
        raise NotImplementedError

    def stored_by_operation(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the values of x [R, C] in `dtype`, its data, and what is left to multiply with, by the operation of a
        graph that makes both; None where this scale has no operation."""
        raise NotImplementedError

    def rounded_by(self, x: Tensor, scale: Tensor, per_row: Tensor, dtype: torch.dtype) -> Operand:
        """Return x as the operand it is with these scales, no quantized copy made. scale: one per matrix or group, what
        is left for the epilogue; per_row: the same, broadcastable to x."""
        values = q.round_per_tensor(x, per_row, self.fp8_dtype, dtype)
        return Operand(values, torch.div(torch.ones_like(scale), scale))

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        dtype = torch.bfloat16 if uses.dtype == torch.bfloat16 else torch.float32
        if rows is not None and rows.offsets is not None:
            of_groups = self.scale_of_groups(rows.offsets.amax(x))
            return Encoding({}, self.rounded_by(x, of_groups, rows.offsets.per_row(of_groups)[:, None], dtype))
        if rows is not None:
            return Encoding(self._of_groups(x, rows, uses.stored))
        if not uses.stored:
            return Encoding({}, self.rounded_matrix(x, dtype))
        if uses.traced:
            if self.fp8_dtype is not torch.float8_e4m3fn or cpu_fields.chosen(x) is not Backend.OPERATION:
                return None
            found = self.stored_by_operation(x, dtype)
            if found is None:
                return None
            values, data, scale_inv = found
            return Encoding({"rowwise_data": data, "rowwise_scale_inv": scale_inv}, Operand(values, scale_inv))
        own = self.scale_of_matrix(x, scale)
        fields, error = quantize_by_scale(x, own, self.fp8_dtype, measured=uses.measured)
        return Encoding(fields, error=error)

    def _of_groups(self, x: Tensor, rows: RowsByGroup, usages: Sequence[Usage]) -> Fields:
        """Return the fields of each usage: the T rows, and for a columnwise use a copy in groups at whole multiples."""
        scale = self.scale_of_groups(q.grouped_amax(x, rows.m_splits))
        scale_inv = torch.div(torch.ones_like(scale), scale)
        apart = "columnwise" in usages and rows.align > 1
        copies = q.quantize_grouped_per_tensor(
            x, rows.m_splits, scale, self.fp8_dtype, align=rows.align, columnwise=apart
        )
        fields: Fields = {}
        for usage in usages:
            fields[f"{usage}_data"] = copies[-1 if usage == "columnwise" else 0]
            fields[f"{usage}_scale_inv"] = scale_inv
        return fields

    def operand(self, fields: Fields, use: Use) -> Operand | ScaledOperand:
        data, scale_inv = fields["rowwise_data"], fields["rowwise_scale_inv"]
        if use.quantized:
            found = ScaledOperand(data, scale_inv, "per_tensor")
            return found if use.usage == "rowwise" else found.mT
        dtype = torch.bfloat16 if use.dtype == torch.bfloat16 else torch.float32
        if data.dtype is torch.float8_e4m3fn and cpu_fields.chosen(data, dtype) is Backend.OPERATION:
            return Operand(fields_op.read_numbers(data, dtype), scale_inv)
        # by way of float32: the compiler vectorises FP8 -> float32, but not FP8 -> bfloat16 (8 times slower on CPU)
        return Operand(q.fp8_to_float(data).to(dtype), scale_inv)


@value_class
@dataclass(frozen=True, kw_only=True)
class Float8CurrentScalingQuantizer(OneScale, FP8Quantizer):
    """One float32 scale per matrix, from its own amax. Fields: data [..., R, C], scale_inv [...]."""

    FORMAT: ClassVar[str] = "float8"

    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epsilon(self.amax_epsilon)

    @derived
    def symmetric(self) -> bool:
        return True

    @derived
    def block(self) -> None:
        return None

    def scale(self, amax: Tensor) -> Tensor:
        """Return the factor to multiply with before the cast, for amaxes of any shape."""
        return q.scale_from_amax(amax, self.fp8_dtype, pow2=self.force_pow_2_scales, epsilon=self.amax_epsilon)

    def amax_of(self, x: Tensor, usage: Usage) -> Tensor:
        return q.amax(x)

    def scale_of_matrix(self, x: Tensor, scale: Scale) -> Tensor:
        amax = scale.amaxes.get("rowwise") if scale.amaxes else None
        return self.scale(q.amax(x) if amax is None else amax)

    def scale_of_groups(self, amax: Tensor) -> Tensor:
        return self.scale(amax)

    def rounded_matrix(self, x: Tensor, dtype: torch.dtype) -> Operand:
        pow2, epsilon = self.force_pow_2_scales, self.amax_epsilon or 0.0  # a literal, as in blockwise
        return Operand(*q.round_current(x, self.fp8_dtype, dtype, pow2=pow2, epsilon=epsilon))

    def stored_by_operation(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return fields_op.store_current(x, self.force_pow_2_scales, self.amax_epsilon or 0.0, dtype)

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        return q.dequantize_per_tensor(fields["rowwise_data"], fields["rowwise_scale_inv"][..., None, None], dtype)
