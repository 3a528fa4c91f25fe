"""NVFP4: E2M1 values, two in a byte, an E4M3 scale per 16 of them and one float32 amax per matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize.cpu import fields as cpu_fields
from te_models.kernels.quantize.cpu import fields_op
from te_models.kernels.quantize.fp8.dequantize_grouped import unpad_rows
from te_models.suggestions import check_choice, shown

from .base import Quantizer
from .encoding import Encoding, Fields, Parts, RowsByGroup, Scale, Schema, Usage, Use, Uses
from .group_offsets import GroupOffsets
from .value import derived, value_class

_BLOCK = 16
_NO_SHAPE = "packed NVFP4 fields do not tell their matrix's shape; pass shape, [..., rows, columns]"
_STREAM: dict[Usage, int] = {"rowwise": 0, "columnwise": 1}


@value_class
@dataclass(frozen=True, kw_only=True)
class NVFP4Quantizer(Quantizer):
    """1x16 blocks, or 16x16 (with_2d_quantization, whose transpose has the same numbers: one copy is stored).

    with_rht: the columnwise copy is quantized from the random Hadamard transform along the rows, of bfloat16 values;
    its rows are rounded up to a multiple of 16. The transform cancels against another such operand, and only there.
    with_random_sign_mask=False: the transform without its signs. stochastic_rounding: both copies are rounded with
    random bits from `key`, required then. row_scaled_nvfp4: an amax for each row instead of each matrix, in the rowwise
    copy, the only one then. nvfp4_use_4over6: two candidates per block, as `kernels/quantize/nvfp4/four_over_six.py`
    says, with nvfp4_e4m3_max (448, 256) and nvfp4_4over6_err_mode ("MAE", "MSE"). Raises ValueError for options that
    exclude each other, and for a missing or malformed key.

    Fields: rowwise data uint8 [..., R, ceil(C/2)], scale_inv float8_e4m3fn [..., R, ceil(C/16)], amax float32 [...]
    (row_scaled_nvfp4: [..., R, 1]); columnwise ones of the transpose, [..., C, ceil(R/2)], [..., C, ceil(R/16)], [...].

    No GEMM and no kernel takes one scale per row or 256 as the largest block scale: such operands are
    dequantized, to float32 where the rows have scales, and four over six is computed by operations of torch.
    """

    FORMAT: ClassVar[str] = "nvfp4"
    PARTS: ClassVar[tuple[str, ...]] = ("data", "scale_inv", "amax")
    SCHEMA: ClassVar[Schema] = Schema(values_per_entry=2, scale_block=(1, _BLOCK))
    ENCODES_ROWS: ClassVar[bool] = True
    LATER_FIELDS: ClassVar[tuple[str, ...]] = (
        "with_random_sign_mask",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
        "nvfp4_4over6_err_mode",
    )

    with_rht: bool = False
    stochastic_rounding: bool = False
    with_2d_quantization: bool = False
    with_random_sign_mask: bool = True
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: q.ErrorMode = "MAE"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.with_2d_quantization and (self.with_rht or self.row_scaled_nvfp4):
            other = "with_rht" if self.with_rht else "row_scaled_nvfp4"
            raise ValueError(f"{other} and with_2d_quantization are both True; allowed: one of the two")
        if self.nvfp4_use_4over6 and (self.with_rht or self.stochastic_rounding):
            other = "with_rht" if self.with_rht else "stochastic_rounding"
            raise ValueError(f"{other} and nvfp4_use_4over6 are both True; allowed: one of the two")
        if self.nvfp4_e4m3_max not in ((448, 256) if self.nvfp4_use_4over6 else (448,)):
            allowed = "448, 256" if self.nvfp4_use_4over6 else "448, and 256 with nvfp4_use_4over6"
            raise ValueError(f"nvfp4_e4m3_max is {shown(self.nvfp4_e4m3_max)}; allowed: {allowed}")
        check_choice("nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ("MAE", "MSE"))

    @derived
    def symmetric(self) -> bool:
        return self.with_2d_quantization

    @derived
    def block(self) -> tuple[int, int]:
        return (_BLOCK if self.with_2d_quantization else 1, _BLOCK)

    @derived
    def transformed(self) -> bool:
        return self.with_rht

    @derived
    def random_signs(self) -> bool:
        return self.with_random_sign_mask

    @derived
    def row_scaled(self) -> bool:
        return self.row_scaled_nvfp4

    @derived
    def _ordinary(self) -> bool:
        """Whether kernels quantize to it, and GEMMs take it."""
        return not (self.row_scaled_nvfp4 or self.nvfp4_use_4over6)

    def of_transpose(self) -> Quantizer | None:
        # the copies are made differently, or the one copy is packed along its rows
        return None if self.with_rht or self.symmetric or self.row_scaled else super().of_transpose()

    @derived
    def exact_in_bfloat16(self) -> bool:
        return not self.row_scaled_nvfp4  # a row's float32 scale times a value is not

    def part_dtype(self, part: str) -> torch.dtype | None:
        return {"data": torch.uint8, "scale_inv": torch.float8_e4m3fn, "amax": torch.float32}[part]

    def needs_key(self) -> bool:
        return self.stochastic_rounding

    def largest(self) -> float:
        return 6.0

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        key, usage = scale.key, uses.multiplied
        if rows is not None and rows.offsets is None:
            return Encoding(self._of_groups(x, rows.m_splits, key, uses.stored))
        if rows is not None and usage is not None and not self.row_scaled_nvfp4:
            return Encoding({}, self._rounded_rows(x, usage, uses.dtype, rows.offsets, key))  # type: ignore[arg-type]
        copies = self._copies(x, scale, uses) if uses.stored else Encoding({})
        if usage is None or copies is None or not self._ordinary or uses.stored == ("rowwise",):
            return copies  # the operand is read from fields
        return copies._replace(operand=self._rounded(x, "rowwise" if self.symmetric else usage, uses.dtype, key))

    def _rounded(self, x: Tensor, stored: Usage, dtype: torch.dtype, key: Tensor | None) -> Operand:
        if self.with_rht and stored == "columnwise":
            x = self._transformed(x, stored)
        block: tuple[int, int] = self.block if stored == "rowwise" else self._columnwise_block  # type: ignore[assignment]
        drawn = self.checked_key(key) if self.stochastic_rounding else None
        dtype = dtype if dtype == torch.bfloat16 else torch.float32
        return Operand(*q.round_current_nvfp4(x, dtype, block=block, key=drawn, stream=_STREAM[stored]))

    def _rounded_rows(
        self, x: Tensor, usage: Usage, dtype: torch.dtype, rows: GroupOffsets, key: Tensor | None
    ) -> Operand:
        x = self._transformed(x, usage)
        amax, block = rows.amax(x), self._block_of(usage)
        per_block = rows.per_row(amax)[:: block[0], None]
        if self.nvfp4_use_4over6:
            packed, scales, _ = self._four_over_six(x, usage, per_block)
            return self._decoded((packed, scales, amax), usage, dtype, x.shape)
        key, dtype = self.checked_key(key), self.gemm_dtype(dtype)
        values, _ = q.round_nvfp4(x, dtype, block=block, amax=per_block, key=key, stream=_STREAM[usage])
        return Operand(values, q.global_decode(amax))

    def checked_key(self, key: Tensor | None) -> Tensor | None:
        """Return the key to draw from, None where rounding is to nearest. ValueError where a key is needed and is
        missing, or is not a key."""
        if not self.stochastic_rounding:
            return None
        if key is None:
            raise ValueError("stochastic rounding draws from a key; pass key, an int64 tensor (seed, counter)")
        if key.shape != (2,) or key.dtype != torch.int64:
            raise ValueError(f"key is {key.dtype} of shape {tuple(key.shape)}; allowed: int64 [2], (seed, counter)")
        return key

    def _rotates(self, usage: Usage) -> bool:
        return self.with_rht and usage == "columnwise"

    def _transformed(self, x: Tensor, usage: Usage) -> Tensor:
        if not self._rotates(usage):
            return x
        x = x if self.with_random_sign_mask else self._unmasked(x)
        return q.random_hadamard(x.to(torch.bfloat16), -2)

    def _unmasked(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """Return x [..., R, C] such that the transform of it along the rows is the one without random signs, if that is
        wanted. position: [R], of each row in its matrix; None: 0, 1, ..."""
        if self.with_random_sign_mask or not self.with_rht:
            return x
        return q.flip_signs(x, torch.arange(x.shape[-2], device=x.device) if position is None else position)

    def _factor(self, amax: Tensor) -> Tensor:
        """Return what decoding multiplies with for these amaxes."""
        return q.global_decode(amax, self.nvfp4_e4m3_max)

    def _four_over_six(self, x: Tensor, usage: Usage, amax: Tensor | None) -> Parts:
        """Return the parts of one usage. amax: of each matrix, or in x's orientation broadcastable to its blocks."""
        block_rows, options = self.block[0], {"e4m3_max": self.nvfp4_e4m3_max, "err_mode": self.nvfp4_4over6_err_mode}
        if usage == "columnwise":
            x, amax = x.mT.contiguous(), amax if amax is None or amax.dim() < x.dim() else amax.mT
        return q.quantize_four_over_six(x, block_rows=block_rows, amax=amax, **options)

    def amax_of(self, x: Tensor, usage: Usage) -> Tensor | None:
        return None if self.row_scaled_nvfp4 else q.amax(self._transformed(x, usage))

    def amaxes(self, x: Tensor) -> dict[Usage, Tensor]:
        if self.with_rht or self.row_scaled_nvfp4:
            return super().amaxes(x)
        return dict.fromkeys(self.stored_usages(), q.amax(x))  # neither copy is transformed

    def _copies(self, x: Tensor, scale: Scale, uses: Uses) -> Encoding | None:
        """Quantize x as it lies for each usage; in a graph by an operation, where there is one."""
        if uses.traced:
            # the transform fills up the rows to whole blocks, whatever their number
            if uses.stored != ("columnwise",) or not self.with_rht or self.stochastic_rounding or not self._ordinary:
                return None
            if cpu_fields.chosen(x) is not Backend.OPERATION:
                return None
            parts = fields_op.store_nvfp4(self._transformed(x, "columnwise").mT.contiguous())
            return Encoding(self.named(parts, uses.stored))
        found: list[Tensor] = []
        for usage in uses.stored:
            amax = scale.amaxes.get(usage) if scale.amaxes else None
            if uses.measured and uses.stored == ("rowwise",):
                measured = self._in_one_pass(x, amax, measured=True)
                if measured is not None:
                    return Encoding(self.named(measured[0], uses.stored), error=measured[1])
            found += self._quantize(x, usage, scale.key, amax)
        return Encoding(self.named(found, uses.stored))

    def _quantize(self, x: Tensor, usage: Usage, key: Tensor | None, amax: Tensor | None = None) -> Parts:
        key, stream = self.checked_key(key) if self.stochastic_rounding else None, _STREAM[usage]
        if self.row_scaled_nvfp4:
            if usage == "columnwise":
                raise ValueError(
                    "row_scaled_nvfp4 has no columnwise copy; pass columnwise=False, and a HybridQuantizer where one "
                    "is needed"
                )
            amax = q.row_amax(x)
        if self.nvfp4_use_4over6:
            return self._four_over_six(x, usage, amax)
        if usage == "columnwise" and not self.with_2d_quantization:
            if cpu_fields.chosen(x) is Backend.COMPILED:
                x = self._transformed(x, usage) if self.with_rht else x
                return self._packed(x.mT.contiguous(), amax, key, stream)
            x = x if self.with_random_sign_mask else self._unmasked(x)
            return q.quantize_nvfp4_transposed(x, with_rht=self.with_rht, amax=amax, key=key, stream=stream)
        return self._packed(x.mT.contiguous() if usage == "columnwise" else x, amax, key, stream)

    def _packed(self, x: Tensor, amax: Tensor | None, key: Tensor | None, stream: int) -> Parts:
        """Return packed values, scales and amax of x, rounded as it lies."""
        found = self._in_one_pass(x, amax, measured=False)
        if found is not None:
            return found[0]
        return q.quantize_nvfp4(x, block_rows=self.block[0], amax=amax, key=key, stream=stream)

    def _in_one_pass(self, x: Tensor, amax: Tensor | None, *, measured: bool) -> tuple[Parts, float] | None:
        """Return packed values, scales and amax of x as it lies, and the largest error where it is `measured`."""
        if (
            not self._ordinary
            or self.stochastic_rounding
            or x.shape[-1] % _BLOCK
            or cpu_fields.chosen(x) is not Backend.COMPILED
        ):
            return None
        amax = q.amax(x) if amax is None else amax
        found = cpu_fields.quantize_nvfp4(x, self.block[0], float(amax), measured=measured)
        return None if found is None else ((*found[:2], amax), found[2])

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        """Return the values of stored fields, transformed back."""
        usage = self._usage_in(fields)
        operand = self._decoded(self.parts_of(fields, usage), usage, torch.float32, shape)
        assert shape is not None, "there is none without a shape"
        values = operand.values if operand.scale is None else operand.values * operand.scale[..., None, None]
        if self._rotates(usage):
            values = self._unmasked(q.inverse_random_hadamard(values, -2))[..., : shape[-2], :]
        return values.to(dtype)

    def operand(self, fields: Fields, use: Use) -> Operand | ScaledOperand:
        parts, usage, shape = self.parts_of(fields, use.usage), self._stored_as(use.usage), use.shape
        if not use.quantized or self.row_scaled_nvfp4 or self.nvfp4_e4m3_max != 448:
            return self._decoded(parts, usage, use.dtype, shape)
        data, scale_inv, amax = parts
        if usage != use.usage:
            if shape is None:
                raise ValueError(_NO_SHAPE)
            # packed values have no transposed view: the same numbers are packed along the other dimension
            data, scale_inv = q.transpose_nvfp4(data, scale_inv, shape[-1])
        return ScaledOperand(data, scale_inv, "nvfp4", (1, _BLOCK), amax)

    def _decoded(
        self, parts: Sequence[Tensor], usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None
    ) -> Operand:
        if shape is None:
            raise ValueError(_NO_SHAPE)
        packed, scales, amax = parts
        if usage == "rowwise":
            values = q.decode_blocks(packed, scales, shape[-1])
        else:
            found = self._decoded_columns(packed, scales, shape[-2], self.gemm_dtype(dtype))
            if found is None:
                rows = -(-shape[-2] // _BLOCK) * _BLOCK if self._rotates(usage) else shape[-2]
                found = q.decode_blocks(packed, scales, rows)
            values = found.mT
        factor = q.global_decode(amax, self.nvfp4_e4m3_max)
        if self.row_scaled_nvfp4:
            return Operand(values * factor, None)
        return Operand(values.to(self.gemm_dtype(dtype)), factor)

    def _decoded_columns(self, packed: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor | None:
        """Return the columnwise copy of a matrix of this many rows in `dtype`, times its scales, where one pass on a
        CPU decodes it: of whole blocks, as the transform makes them of any number of rows."""
        chosen = cpu_fields.chosen(packed, dtype) if self._ordinary else Backend.DEFINITION
        if chosen is Backend.OPERATION and self.with_rht:
            return fields_op.read_nvfp4(packed, scales, dtype)
        whole = chosen is Backend.COMPILED and (self.with_rht or rows % _BLOCK == 0)
        return cpu_fields.decode_nvfp4(packed, scales, dtype) if whole else None

    def quantizes_rows(self, usage: Usage, align: int) -> bool:
        return not self.with_2d_quantization and super().quantizes_rows(usage, align)

    def _of_groups(self, x: Tensor, m_splits: Tensor, key: Tensor | None, computed: Sequence[Usage]) -> Fields:
        if self.with_2d_quantization:
            raise ValueError(
                f"rows of groups cannot be quantized by {self}; for NVFP4, with_2d_quantization is of weights"
            )
        if self.with_rht and not self.with_random_sign_mask and len(computed) == 2:
            fields = self._of_groups(x, m_splits, key, ("rowwise",))
            return fields | self._of_groups(x, m_splits, key, ("columnwise",))
        flags: dict[str, Any] = {"rowwise": "rowwise" in computed, "columnwise": "columnwise" in computed}
        if self.row_scaled_nvfp4:
            parts = [part for usage in computed for part in self._quantize(x, usage, key)]
        elif self.nvfp4_use_4over6:
            options = {"e4m3_max": self.nvfp4_e4m3_max, "err_mode": self.nvfp4_4over6_err_mode}
            parts = q.quantize_grouped_four_over_six(x, m_splits, **options, **flags)
        else:
            if flags["columnwise"] and self.with_rht and not self.with_random_sign_mask:
                rows = GroupOffsets.of(m_splits, x.shape[0])
                x = self._unmasked(
                    x, torch.arange(x.shape[0], device=x.device) - rows.per_row(rows.ends - rows.m_splits)
                )
            parts = q.quantize_grouped_nvfp4(x, m_splits, with_rht=self.with_rht, key=self.checked_key(key), **flags)
        return self.named(parts, computed)

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        usage = self._usage_in(fields)
        packed, scales, amax = self.parts_of(fields, usage)
        if shape[0] * shape[1] == 0:
            return packed.new_empty(tuple(shape), dtype=dtype)
        rows = GroupOffsets.of(m_splits, shape[0])
        if usage == "rowwise":
            own = amax if self.row_scaled_nvfp4 else rows.per_row(amax)[:, None]
            if self.nvfp4_e4m3_max != 448:
                values = (q.decode_blocks(packed, scales, shape[1]) * self._factor(own)).to(dtype)
            else:
                values = q.dequantize_nvfp4(packed, scales, own, shape[1], dtype)
            return rows.zero_outside(values)
        align = self.row_block(usage)
        scale = rows.padded(align).groups().per_row(self._factor(amax))
        values = q.decode_blocks(packed, scales, packed.shape[1] * 2).mT * scale[:, None]
        if self.with_rht:
            values = self._unmasked(q.inverse_random_hadamard(values, -2))
        return unpad_rows(values, rows.m_splits, align, shape[0]).to(dtype)

    def scales(self, fields: Fields) -> Tensor:
        factor = self._factor(fields["rowwise_amax"])
        return super().scales(fields) * (factor if self.row_scaled_nvfp4 else factor[..., None, None])
