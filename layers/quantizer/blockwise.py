"""FP8 with a scale per block: 1x128 and 128x128 blocks, and the microscaling (MX) format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize.cpu import fields as cpu_fields
from te_models.kernels.quantize.cpu import fields_op
from te_models.suggestions import check_choice

from .encoding import Encoding, Fields, RowsByGroup, Scale, Schema, Usage, Use, Uses
from .fp8 import FP8Quantizer, check_epsilon
from .value import derived, value_class


@dataclass(frozen=True, kw_only=True)
class _BlockwiseQuantizer(FP8Quantizer):
    """What formats with a scale per block share. Columnwise parts are computed in x's orientation, so that reads stay
    contiguous, and stored as `TRANSPOSED` says."""

    BLOCK: ClassVar[int]
    TRANSPOSED: ClassVar[bool]
    BLOCK_SCALES_ONLY: ClassVar[bool] = True
    ENCODES_ROWS: ClassVar[bool] = True

    @derived
    def scale_kind(self) -> str:
        """The kind of the scales, as `quantize_blockwise` names it."""
        raise NotImplementedError

    @derived
    def _epsilon(self) -> float:
        return 0.0

    @derived
    def exact_in_bfloat16(self) -> bool:
        return self.scale_kind != "float32"  # a float32 scale times an FP8 value is not

    @derived
    def keeps_rows(self) -> bool:
        return self._block_of("rowwise")[0] == 1 and self.scale_kind != "float32"

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        if rows is not None and rows.offsets is None:
            if cpu_fields.chosen(x) is Backend.COMPILED:
                return self.encoded_in_blocks(x, scale, uses, rows)
            return Encoding(self._fields(self._of_groups(x, rows.m_splits, uses.stored), uses.stored))
        usage = uses.multiplied
        if usage is None:
            return self._stored_copies(x, uses)
        block: tuple[int, int] = self.block if usage == "rowwise" else self._columnwise_block  # type: ignore[assignment]
        # an epsilon of 0 as a literal: a dynamic graph has other floats as variables
        kind, fp8, epsilon = self.scale_kind, self.fp8_dtype, self._epsilon or 0.0
        dtype = uses.dtype if self.exact_in_bfloat16 and uses.dtype is torch.bfloat16 else torch.float32
        stored: Usage | None = uses.stored[0] if uses.stored else None
        found = None
        if fp8 is torch.float8_e4m3fn and not uses.traced:
            other = self.block if stored == "rowwise" else self._columnwise_block if stored else None
            found = cpu_fields.encode_blocks(x, other, block, kind, epsilon, dtype)
        if found is not None:
            values, copy = found
            if stored is None or copy is None:
                return Encoding({}, Operand(values, None))
            data, scale_inv = copy[:2]
            if stored == "columnwise" and self.TRANSPOSED:
                data, scale_inv = data.mT, scale_inv.mT
            return Encoding({f"{stored}_data": data, f"{stored}_scale_inv": scale_inv}, Operand(values, None))
        fields: Fields = {}
        if stored is not None and not uses.traced and len(self._usages) == 2 and usage == "rowwise":
            values, parts = q.quantize_and_round(x, block, fp8, kind, dtype, epsilon=epsilon, both=True)
            parts = parts[:2] if stored == "rowwise" else parts[2:]
            return Encoding(self._fields(parts, uses.stored), Operand(values, None))
        if stored is not None:
            copies = self._stored_copies(x, uses)
            if copies is None or (stored == usage and not uses.traced):
                return copies
            fields = copies.fields
        return Encoding(fields, Operand(q.round_blockwise(x, block, fp8, kind, dtype, epsilon=epsilon), None))

    def _stored_copies(self, x: Tensor, uses: Uses) -> Encoding | None:
        kind, fp8, epsilon, usages = self.scale_kind, self.fp8_dtype, self._epsilon, uses.stored
        parts: list[Tensor] = []
        if uses.traced:
            if fp8 is not torch.float8_e4m3fn or cpu_fields.chosen(x) is not Backend.OPERATION:
                return None
            for usage in usages:
                parts += fields_op.store_blocks(x, self._block_of(usage), kind, epsilon or 0.0)
            return Encoding(self._fields(parts, usages))
        error = 0.0
        for usage in usages if fp8 is torch.float8_e4m3fn else ():
            found = cpu_fields.quantize_blocks(x, self._block_of(usage), kind, epsilon, measured=uses.measured)
            if found is None:
                break
            parts, error = [*parts, *found[:2]], max(error, found[2])
        else:
            if parts:
                return Encoding(self._fields(parts, usages), error=error if uses.measured else None)
        if len(usages) == 2:
            block: tuple[int, int] = self.block  # type: ignore[assignment]  # blocks are what this format has
            parts = list(q.quantize_blockwise_both(x, block, fp8, kind, epsilon=epsilon))
        else:
            parts = list(q.quantize_blockwise(x, self._block_of(usages[0]), fp8, kind, epsilon=epsilon))
        return Encoding(self._fields(parts, usages))

    def _of_groups(self, x: Tensor, m_splits: Tensor, usages: Sequence[Usage]) -> list[Tensor]:
        block: tuple[int, int] = self.block  # type: ignore[assignment]  # as above
        copies = {"rowwise": "rowwise" in usages, "columnwise": "columnwise" in usages}
        return q.quantize_grouped_blockwise(
            x, m_splits, block, self.fp8_dtype, self.scale_kind, epsilon=self._epsilon, **copies
        )

    def operand(self, fields: Fields, use: Use) -> Operand | ScaledOperand:
        usage, dtype = self._stored_as(use.usage), self.gemm_dtype(use.dtype)
        data, scale_inv = fields[f"{usage}_data"], fields[f"{usage}_scale_inv"]
        if use.quantized:
            if usage == "columnwise" and not self.TRANSPOSED:
                data, scale_inv = data.mT, scale_inv.mT
            found = ScaledOperand(data, scale_inv, self.scale_kind, self.block)  # type: ignore[arg-type]
            return found if usage == use.usage else found.mT
        data, scale_inv = self._as_it_lies(data, scale_inv, usage)
        values = fields_op.decoded(data, scale_inv, self._block_of(usage), dtype)
        if values is None:
            values = q.dequantize_blockwise(data, scale_inv, self._block_of(usage), dtype)
        return Operand(values, None)

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        usage = self._usage_in(fields)
        data, scale_inv = self._as_it_lies(fields[f"{usage}_data"], fields[f"{usage}_scale_inv"], usage)
        block: tuple[int, int] = self.block if usage == "rowwise" else self._columnwise_block  # type: ignore[assignment]
        return q.dequantize_blockwise(data, scale_inv, block, dtype)

    def _as_it_lies(self, data: Tensor, scale_inv: Tensor, usage: Usage) -> tuple[Tensor, Tensor]:
        """Turn the storage's orientation into x's, or back."""
        if not self.TRANSPOSED or usage == "rowwise":
            return data, scale_inv
        return data.mT, scale_inv.mT if scale_inv.dim() > 1 else scale_inv  # scales of a graph are one line

    def _fields(self, parts: Sequence[Tensor], usages: Sequence[Usage]) -> Fields:
        """Name the data and scales of these usages, made in x's orientation."""
        fields: Fields = {}
        for i, usage in enumerate(usages):
            data, scale_inv = parts[2 * i : 2 * i + 2]
            if usage == "columnwise" and self.TRANSPOSED:
                data, scale_inv = self._as_it_lies(data, scale_inv, usage)
            fields[f"{usage}_data"], fields[f"{usage}_scale_inv"] = data, scale_inv
        return fields

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


@value_class
@dataclass(frozen=True, kw_only=True)
class Float8BlockQuantizer(_BlockwiseQuantizer):
    """Scales per 1x128 (block_scaling_dim 1) or 128x128 (2) block.

    Fields: rowwise data [..., R, C] and scale_inv [..., ceil(R/br), ceil(C/128)]; the columnwise copy of 1-D blocks is
    stored transposed: data [..., C, R], scale_inv [..., C, ceil(R/128)]. ValueError for another block_scaling_dim.
    """

    FORMAT: ClassVar[str] = "float8_block"
    BLOCK: ClassVar[int] = 128
    SCHEMA: ClassVar[Schema] = Schema(transposed_view=True)
    TRANSPOSED: ClassVar[bool] = True

    block_scaling_dim: int = 2
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("block_scaling_dim", self.block_scaling_dim, (1, 2))
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


@value_class
@dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer(_BlockwiseQuantizer):
    """Scale bytes (E8M0) per 1x32 block, or 32x32 when two_dimensional.

    Fields: data [..., R, C], scale_inv uint8 [..., R, ceil(C/32)]; columnwise data is not transposed, its scales are
    [..., ceil(R/32), C]. two_dimensional: scale_inv
    [..., ceil(R/32), ceil(C/32)], one copy.
    """

    FORMAT: ClassVar[str] = "mxfp8"
    BLOCK: ClassVar[int] = 32
    SCHEMA: ClassVar[Schema] = Schema(columnwise_transposed=False)
    TRANSPOSED: ClassVar[bool] = False

    two_dimensional: bool = False

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
