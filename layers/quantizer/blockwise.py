"""FP8 with a scale per block: 1x128 and 128x128 blocks, and the microscaling (MX) format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize import cpu_fields
from te_models.kernels.quantize.fp8.dequantize_grouped import dequantize_grouped
from te_models.kernels.quantize.fp8.grouped import pad_rows
from te_models.suggestions import shown

from .base import Fields, Parts, Usage
from .fp8 import FP8Quantizer, check_epsilon
from .value import derived, value_class


@dataclass(frozen=True, kw_only=True)
class _BlockwiseQuantizer(FP8Quantizer):
    """What formats with a scale per block share. Columnwise parts are computed in x's orientation, so that reads stay
    contiguous, and stored as `TRANSPOSED` says."""

    BLOCK: ClassVar[int]
    TRANSPOSED: ClassVar[bool]
    BLOCK_SCALES_ONLY: ClassVar[bool] = True

    @derived
    def scale_kind(self) -> str:
        """The kind of the scales, as `quantize_blockwise` names it."""
        raise NotImplementedError

    @derived
    def _epsilon(self) -> float:
        return 0.0

    def _stored(self, parts: Parts, usage: Usage) -> Parts:
        """Turn x's orientation into the storage's, or back."""
        if not self.TRANSPOSED or usage == "rowwise":
            return parts
        return tuple(part.mT if part.dim() > 1 else part for part in parts)  # scales of a graph are one line

    def _quantize(self, x: Tensor, usage: Usage, key: Tensor | None, amax: Tensor | None = None) -> Parts:
        found = self._in_one_pass(x, usage, measured=False)
        if found is None:
            block = self._block_of(usage)
            found = q.quantize_blockwise(x, block, self.fp8_dtype, self.scale_kind, epsilon=self._epsilon)
        return self._stored(found[:2], usage)

    def quantize_in_one_pass(self, x: Tensor, usage: Usage, amax: Tensor | None) -> tuple[Parts, float] | None:
        found = self._in_one_pass(x, usage, measured=True)
        return None if found is None else (self._stored(found[:2], usage), found[2])

    def _in_one_pass(self, x: Tensor, usage: Usage, *, measured: bool) -> cpu_fields.Measured | None:
        """Return data and scales of a usage, in x's orientation, and the largest error where it is `measured`."""
        if self.fp8_dtype is not torch.float8_e4m3fn:
            return None
        block = self._block_of(usage)
        return cpu_fields.quantize_blocks(x, block, self.scale_kind, self._epsilon, measured=measured)

    def operand(self, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None) -> Operand:
        block: tuple[int, int] = self.block if usage == "rowwise" else self._columnwise_block  # type: ignore[assignment]
        epsilon = self._epsilon or 0.0  # 0 as a literal: a dynamic graph has other floats as variables
        exact_dtype = dtype if self.exact_in_bfloat16 and dtype is torch.bfloat16 else torch.float32
        return Operand(q.round_blockwise(x, block, self.fp8_dtype, self.scale_kind, exact_dtype, epsilon=epsilon), None)

    def quantize_fields(
        self, x: Tensor, key: Tensor | None = None, amaxes: Mapping[Usage, Tensor] | None = None
    ) -> Fields:
        found = self._all_in_one_pass(x, None, self._usages)
        if found is not None or len(self._usages) == 1:
            return super().quantize_fields(x, key) if found is None else self._fields(found, self._usages)
        return self._fields(
            q.quantize_blockwise_both(
                x,
                self.block,  # pyright: ignore[reportArgumentType]
                self.fp8_dtype,
                self.scale_kind,
                epsilon=self._epsilon,
            ),
            self._usages,
        )

    def operand_and_fields(
        self, x: Tensor, dtype: torch.dtype, usage: Usage, key: Tensor | None = None
    ) -> tuple[Operand, Fields]:
        block: tuple[int, int] = self.block  # type: ignore[assignment]  # blocks are what this format has
        exact_dtype = dtype if self.exact_in_bfloat16 and dtype is torch.bfloat16 else torch.float32
        if self.fp8_dtype is torch.float8_e4m3fn:
            stored: tuple[int, int] = block if usage == "rowwise" else self._columnwise_block  # type: ignore[assignment]
            found = cpu_fields.encode_blocks(x, stored, block, self.scale_kind, self._epsilon, exact_dtype)
            if found is not None:
                return Operand(found[0], None), self._fields(found[1:], (usage,))
        if len(self._usages) == 1:
            return super().operand_and_fields(x, dtype, usage, key)
        values, parts = q.quantize_and_round(
            x, block, self.fp8_dtype, self.scale_kind, exact_dtype, epsilon=self._epsilon, both=True
        )
        return Operand(values, None), self._fields(parts[:2] if usage == "rowwise" else parts[2:], (usage,))

    def fields_in_graph(self, x: Tensor, usage: Usage) -> Fields | None:
        if self.fp8_dtype is not torch.float8_e4m3fn or cpu_fields.chosen(x) is not Backend.OPERATION:
            return None
        epsilon = self._epsilon or 0.0  # as in `operand`
        parts = cpu_fields.store_blocks(x, self._block_of(usage), self.scale_kind, epsilon)
        return self._fields(parts, (usage,))

    def _operand(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Operand:
        data, scale_inv = self._stored(parts, usage)
        dtype = self.gemm_dtype(dtype)
        found = cpu_fields.decoded(data, scale_inv, self._block_of(usage), dtype)
        return super()._operand(parts, usage, dtype, shape) if found is None else Operand(found, None)

    @derived
    def exact_in_bfloat16(self) -> bool:
        return self.scale_kind != "float32"  # a float32 scale times an FP8 value is not

    def quantize_rows(
        self, x: Tensor, m_splits: Tensor, key: Tensor | None = None, usages: Sequence[Usage] | None = None
    ) -> Fields:
        if usages is None or len(usages) > 1:
            usages = self._usages if usages is None else [usage for usage in self._usages if usage in usages]
        parts = self._all_in_one_pass(x, m_splits, usages)
        if parts is None:
            parts = q.quantize_grouped_blockwise(
                x,
                m_splits,
                self.block,  # pyright: ignore[reportArgumentType]
                self.fp8_dtype,
                self.scale_kind,
                epsilon=self._epsilon,
                rowwise="rowwise" in usages,
                columnwise="columnwise" in usages,
            )
        return self._fields(parts, usages)

    def _all_in_one_pass(self, x: Tensor, m_splits: Tensor | None, usages: Sequence[Usage]) -> list[Tensor] | None:
        """Return data and scales of each usage, of rows in groups of m_splits if any, by the C++ that quantizes
        matrices; None where it does not."""
        parts: list[Tensor] = []
        for usage in usages:
            padded = x
            block_rows = 1 if m_splits is None else self.row_block(usage)
            if m_splits is not None and block_rows > 1:
                if cpu_fields.chosen(x) is not Backend.COMPILED:
                    return None
                padded = pad_rows(x, m_splits, block_rows)
            found = self._in_one_pass(padded, usage, measured=False)
            if found is None:
                return None
            parts += found[:2]
        return parts

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        usage = self._usages[0]
        data, scale_inv = self._stored((fields[f"{usage}_data"], fields[f"{usage}_scale_inv"]), usage)
        return dequantize_grouped(data, scale_inv, m_splits, shape[0], self._block_of(usage), dtype)

    @derived
    def keeps_rows(self) -> bool:
        return self._block_of("rowwise")[0] == 1 and self.scale_kind != "float32"

    def row_parts(self, x: Tensor) -> Parts:
        if not self.keeps_rows:
            return super().row_parts(x)
        fields = self.fields_in_graph(x, "rowwise")
        return self._quantize(x, "rowwise", None) if fields is None else list(fields.values())

    def row_part_shapes(self, columns: int) -> tuple[tuple[torch.dtype, int], ...]:
        scales = self.part_dtype("scale_inv") or torch.float32
        return (self.fp8_dtype, columns), (scales, -(-columns // self.BLOCK))

    def rows_of_parts(self, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return self._operand(parts, "rowwise", dtype, shape).values.to(dtype)

    def output(self) -> q.QuantizedOutput | None:
        rows, columns = self._block_of("rowwise")
        if rows > 1:
            return None
        return q.QuantizedOutput(
            block=columns,
            fp8_dtype=self.fp8_dtype,
            scale_kind=self.scale_kind,
            epsilon=self._epsilon,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
        )

    def fields_of_output(self, copies: Sequence[Tensor]) -> Fields:
        return self._fields(copies, self._usages)

    def _fields(self, parts: Sequence[Tensor], usages: Sequence[Usage]) -> Fields:
        """Name the data and scales of these usages, made in x's orientation."""
        fields: Fields = {}
        for i, usage in enumerate(usages):
            data, scale_inv = parts[2 * i : 2 * i + 2]
            if usage == "columnwise" and self.TRANSPOSED:
                data, scale_inv = self._stored((data, scale_inv), usage)
            fields[f"{usage}_data"], fields[f"{usage}_scale_inv"] = data, scale_inv
        return fields

    def _dequantize(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Tensor:
        block = self.block if usage == "rowwise" else self._columnwise_block
        data, scale_inv = parts if usage == "rowwise" else self._stored(parts, usage)
        return q.dequantize_blockwise(data, scale_inv, block, dtype)  # pyright: ignore[reportArgumentType]

    def _scaled(self, parts: Parts, usage: Usage) -> ScaledOperand:
        data, scale_inv = parts
        if usage == "columnwise" and not self.TRANSPOSED:
            data, scale_inv = data.mT, scale_inv.mT
        return ScaledOperand(data, scale_inv, self.scale_kind, self.block)  # type: ignore[arg-type]


@value_class
@dataclass(frozen=True, kw_only=True)
class Float8BlockQuantizer(_BlockwiseQuantizer):
    """Scales per 1x128 (block_scaling_dim 1) or 128x128 (2) block.

    Fields: rowwise data [..., R, C] and scale_inv [..., ceil(R/br), ceil(C/128)]; the columnwise copy of 1-D blocks is
    stored transposed: data [..., C, R], scale_inv [..., C, ceil(R/128)]. ValueError for another block_scaling_dim.
    """

    FORMAT: ClassVar[str] = "float8_block"
    BLOCK: ClassVar[int] = 128
    TRANSPOSED: ClassVar[bool] = True

    block_scaling_dim: int = 2
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim is {shown(self.block_scaling_dim)}; allowed: 1, 2")
        check_epsilon(self.amax_epsilon)

    @derived
    def symmetric(self) -> bool:
        return self.block_scaling_dim == 2

    @derived
    def block(self) -> tuple[int, int]:
        return (self.BLOCK if self.symmetric else 1, self.BLOCK)

    @derived
    def scale_kind(self) -> str:
        return "pow2" if self.force_pow_2_scales else "float32"

    @derived
    def _epsilon(self) -> float:
        return self.amax_epsilon

    def square_blocks(self, usage: Usage) -> bool:
        return self.block_scaling_dim == 2


@value_class
@dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer(_BlockwiseQuantizer):
    """Scale bytes (E8M0) per 1x32 block, or 32x32 when two_dimensional.

    Fields: data [..., R, C], scale_inv uint8 [..., R, ceil(C/32)]; columnwise data is not transposed, its scales are
    [..., ceil(R/32), C]. two_dimensional (or Transformer Engine's with_2d_quantization): scale_inv
    [..., ceil(R/32), ceil(C/32)], one copy.
    """

    FORMAT: ClassVar[str] = "mxfp8"
    BLOCK: ClassVar[int] = 32
    TRANSPOSED: ClassVar[bool] = False

    two_dimensional: bool = False

    @property
    def with_2d_quantization(self) -> bool:
        """two_dimensional, by Transformer Engine's name."""
        return self.two_dimensional

    @derived
    def symmetric(self) -> bool:
        return self.two_dimensional

    @derived
    def block(self) -> tuple[int, int]:
        return (self.BLOCK if self.two_dimensional else 1, self.BLOCK)

    @derived
    def scale_kind(self) -> str:
        return "e8m0"

    def part_dtype(self, part: str) -> torch.dtype | None:
        return torch.uint8 if part == "scale_inv" else super().part_dtype(part)
