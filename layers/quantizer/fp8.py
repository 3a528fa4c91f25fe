"""FP8 with one float32 scale per matrix, and the base of all FP8 quantizers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize import cpu_fields
from te_models.kernels.quantize.fp8.dequantize_grouped import dequantize_grouped
from te_models.suggestions import shown

from .base import Fields, Parts, Quantizer, Usage
from .group_offsets import GroupOffsets
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
            raise ValueError(f"fp8_dtype is {shown(self.fp8_dtype)}; allowed: {', '.join(map(str, q.FP8_MAX))}")

    def part_dtype(self, part: str) -> torch.dtype | None:
        return self.fp8_dtype if part == "data" else torch.float32

    def statistics(
        self, x: Tensor, key: Tensor | None = None, amax: Tensor | None = None, count: Tensor | None = None
    ) -> dict[str, Tensor]:
        parts = self._quantize(x, "rowwise", key, amax)
        values = self._dequantize(parts, "rowwise", torch.float32, x.shape)
        scale_inv = q.e8m0_to_float(parts[1]) if parts[1].dtype == torch.uint8 else parts[1]
        return q.block_statistics(x, values, scale_inv, self.block, q.FP8_MAX[self.fp8_dtype], count)

    @classmethod
    def _from_json(cls, field: str, value: Any) -> Any:
        if field != "fp8_dtype":
            return value
        dtypes = {str(d).removeprefix("torch."): d for d in q.FP8_MAX}
        if value not in dtypes:
            raise ValueError(f"fp8_dtype is {shown(value)}; allowed: {', '.join(map(repr, dtypes))}")
        return dtypes[value]


def quantize_by_scale(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Parts:
    """Return (x [..., R, C] times the scale of its matrix as FP8, what to multiply with when dequantizing).

    scale: float32 [...]. Eagerly on a CPU one C++ pass makes E4M3 of a matrix, of a NaN and elsewhere an operation.
    """
    scale_inv = torch.div(torch.ones_like(scale), scale)
    if fp8_dtype is torch.float8_e4m3fn and cpu_fields.chosen(x) is Backend.COMPILED:
        found = cpu_fields.quantize_scaled(x, float(scale), float(scale_inv), measured=False)
        if found is not None:
            return found[0], scale_inv
    return q.quantize_per_tensor(x, scale[..., None, None], fp8_dtype), scale_inv


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless epsilon is finite and >= 0."""
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"amax_epsilon is {shown(epsilon)}; allowed: a finite number from 0 on")


class OneScale:
    """What quantizers with one scale per matrix do with rows of groups: each group has its own."""

    fp8_dtype: torch.dtype

    def scale_of_groups(self, amax: Tensor) -> Tensor:
        """Return the scale of each group, [G], of these amaxes, [G]."""
        raise NotImplementedError

    def rounded(self, x: Tensor, scale: Tensor, per_row: Tensor, dtype: torch.dtype) -> Operand:
        """Return x as the operand it is with these scales, no quantized copy made. scale: one per matrix or group, what
        is left for the epilogue; per_row: the same, broadcastable to x."""
        exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        values = q.round_per_tensor(x, per_row, self.fp8_dtype, exact)
        return Operand(values, torch.div(torch.ones_like(scale), scale))

    def rows_operand(
        self, x: Tensor, usage: Usage, dtype: torch.dtype, rows: GroupOffsets, key: Tensor | None = None
    ) -> Operand:
        """See `Quantizer.rows_operand`."""
        scale = self.scale_of_groups(rows.amax(x))
        return self.rounded(x, scale, rows.per_row(scale)[:, None], dtype)

    def quantize_rows(
        self, x: Tensor, m_splits: Tensor, key: Tensor | None = None, usages: Sequence[Usage] | None = None
    ) -> Fields:
        """See `Quantizer.quantize_rows`."""
        scale = self.scale_of_groups(q.grouped_amax(x, m_splits))
        return quantize_rows_with(scale, x, m_splits, self.fp8_dtype)[0]

    def quantize_rows_for_gemms(
        self, x: Tensor, m_splits: Tensor, usages: Sequence[Usage], align: int, key: Tensor | None = None
    ) -> dict[Usage, Fields]:
        """See `Quantizer.quantize_rows_for_gemms`."""
        apart = "columnwise" in usages and align > 1
        scale = self.scale_of_groups(q.grouped_amax(x, m_splits))
        copies = quantize_rows_with(scale, x, m_splits, self.fp8_dtype, align=align, columnwise=apart)
        return {usage: copies[-1 if usage == "columnwise" else 0] for usage in usages}


@value_class
@dataclass(frozen=True, kw_only=True)
class Float8CurrentScalingQuantizer(OneScale, FP8Quantizer):
    """One float32 scale per matrix, from its own amax. Fields: data [..., R, C], scale_inv [...].

    Accepted as in Transformer Engine: device, the second positional argument, without effect (there is no buffer to
    place); with_amax_reduction and amax_reduction_group at their defaults.
    """

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

    def _quantize(self, x: Tensor, usage: Usage, key: Tensor | None, amax: Tensor | None = None) -> Parts:
        scale = self.scale(q.amax(x) if amax is None else amax)
        return quantize_by_scale(x, scale, self.fp8_dtype)

    def quantize_in_one_pass(self, x: Tensor, usage: Usage, amax: Tensor | None) -> tuple[Parts, float] | None:
        if self.fp8_dtype is not torch.float8_e4m3fn or cpu_fields.chosen(x) is not Backend.COMPILED:
            return None
        scale = self.scale(q.amax(x) if amax is None else amax)
        scale_inv = torch.div(torch.ones_like(scale), scale)
        found = cpu_fields.quantize_scaled(x, float(scale), float(scale_inv))
        return None if found is None else ((found[0], scale_inv), found[1])

    def _dequantize(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Tensor:
        data, scale_inv = parts
        return q.dequantize_per_tensor(data, scale_inv[..., None, None], dtype)

    def operand(self, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None) -> Operand:
        pow2, epsilon = self.force_pow_2_scales, self.amax_epsilon or 0.0  # a literal, as in blockwise
        return Operand(*q.round_current(x, self.fp8_dtype, self.gemm_dtype(dtype), pow2=pow2, epsilon=epsilon))

    def operand_and_fields_in_graph(self, x: Tensor, dtype: torch.dtype, usage: Usage) -> tuple[Operand, Fields] | None:
        if self.fp8_dtype is not torch.float8_e4m3fn or cpu_fields.chosen(x) is not Backend.OPERATION:
            return None
        pow2, epsilon = self.force_pow_2_scales, self.amax_epsilon or 0.0
        values, data, scale_inv = cpu_fields.store_current(x, pow2, epsilon, self.gemm_dtype(dtype))
        return Operand(values, scale_inv), {"rowwise_data": data, "rowwise_scale_inv": scale_inv}

    def _operand(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Operand:
        data, scale_inv = parts
        dtype = self.gemm_dtype(dtype)
        if data.dtype is torch.float8_e4m3fn and cpu_fields.chosen(data, dtype) is Backend.OPERATION:
            return Operand(cpu_fields.read_numbers(data, dtype), scale_inv)
        # by way of float32: the compiler vectorises FP8 -> float32, but not FP8 -> bfloat16 (8 times slower on CPU)
        return Operand(q.fp8_to_float(data).to(dtype), scale_inv)

    def _scaled(self, parts: Parts, usage: Usage) -> ScaledOperand:
        data, scale_inv = parts
        return ScaledOperand(data, scale_inv, "per_tensor")

    def scale_of_groups(self, amax: Tensor) -> Tensor:
        return self.scale(amax)

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        data, scale_inv = fields["rowwise_data"], fields["rowwise_scale_inv"]
        return dequantize_grouped(data, scale_inv, m_splits, shape[0], None, dtype)


def quantize_rows_with(
    scale: Tensor,
    x: Tensor,
    m_splits: Tensor,
    fp8_dtype: torch.dtype,
    *,
    align: int = 1,
    columnwise: bool = False,
) -> list[Fields]:
    """Quantize x: [T, C] with one scale per group, [G]: the fields of the T rows and, if `columnwise`, the fields of a
    copy in padded rows whose groups begin at multiples of `align`."""
    scale_inv = torch.div(torch.ones_like(scale), scale)
    copies = q.quantize_grouped_per_tensor(x, m_splits, scale, fp8_dtype, align=align, columnwise=columnwise)
    return [{"rowwise_data": data, "rowwise_scale_inv": scale_inv} for data in copies]
