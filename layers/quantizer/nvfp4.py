"""NVFP4: E2M1 values, two in a byte, an E4M3 scale per 16 of them and one float32 amax per matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize.fp8.dequantize_grouped import unpad_rows

from .base import Fields, Parts, Quantizer, Usage
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
    stochastic_rounding: both copies are rounded with random bits from `key`, which is then required. Raises ValueError
    for with_rht together with with_2d_quantization, and for a missing or malformed key.

    Fields: rowwise data uint8 [..., R, ceil(C/2)], scale_inv float8_e4m3fn [..., R, ceil(C/16)], amax float32 [...];
    columnwise ones of the transpose, [..., C, ceil(R/2)], [..., C, ceil(R/16)], [...].
    """

    FORMAT: ClassVar[str] = "nvfp4"
    PARTS: ClassVar[tuple[str, ...]] = ("data", "scale_inv", "amax")

    with_rht: bool = False
    stochastic_rounding: bool = False
    with_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.with_rht and self.with_2d_quantization:
            raise ValueError("with_rht and with_2d_quantization are both True; allowed: one of the two")

    @derived
    def symmetric(self) -> bool:
        return self.with_2d_quantization

    @derived
    def block(self) -> tuple[int, int]:
        return (_BLOCK if self.with_2d_quantization else 1, _BLOCK)

    @derived
    def transformed(self) -> bool:
        return self.with_rht

    def of_transpose(self) -> Quantizer | None:
        # the copies are made differently, or the one copy is packed along its rows
        return None if self.with_rht or self.symmetric else super().of_transpose()

    def part_dtype(self, part: str) -> torch.dtype | None:
        return {"data": torch.uint8, "scale_inv": torch.float8_e4m3fn, "amax": torch.float32}[part]

    def needs_key(self) -> bool:
        return self.stochastic_rounding

    def operand(self, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None) -> Operand:
        stored: Usage = "rowwise" if self.symmetric else usage
        if self.with_rht and stored == "columnwise":
            x = self._transformed(x, stored)
        block = self.block if stored == "rowwise" else self._columnwise_block
        assert block is not None, "blocks are what this format has"
        drawn = self.checked_key(key) if self.stochastic_rounding else None
        return Operand(
            *q.round_current_nvfp4(x, self.gemm_dtype(dtype), block=block, key=drawn, stream=_STREAM[stored])
        )

    def rows_operand(
        self, x: Tensor, usage: Usage, dtype: torch.dtype, rows: GroupOffsets, key: Tensor | None = None
    ) -> Operand:
        x = self._transformed(x, usage)
        amax, block = rows.amax(x), self._block_of(usage)
        values, _ = q.round_nvfp4(
            x,
            self.gemm_dtype(dtype),
            block=block,
            amax=rows.per_row(amax)[:: block[0], None],
            key=self.checked_key(key),
            stream=_STREAM[usage],
        )
        return Operand(values, q.global_decode(amax))

    def checked_key(self, key: Tensor | None) -> Tensor | None:
        """Return the key to draw from, None where rounding is to nearest. ValueError where one is needed and is not
        there, or is none."""
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
        return q.random_hadamard(x.to(torch.bfloat16), -2) if self._rotates(usage) else x

    def amax_of(self, x: Tensor, usage: Usage) -> Tensor:
        return q.amax(self._transformed(x, usage))

    def amaxes(self, x: Tensor) -> dict[Usage, Tensor]:
        if self.with_rht:
            return super().amaxes(x)
        return dict.fromkeys(self.stored_usages(), q.amax(x))  # neither copy is transformed

    def _quantize(self, x: Tensor, usage: Usage, key: Tensor | None, amax: Tensor | None = None) -> Parts:
        key, stream = self.checked_key(key) if self.stochastic_rounding else None, _STREAM[usage]
        if usage == "columnwise" and not self.with_2d_quantization:
            return q.quantize_nvfp4_transposed(x, with_rht=self.with_rht, amax=amax, key=key, stream=stream)
        x = x.mT.contiguous() if usage == "columnwise" else x
        return q.quantize_nvfp4(x, block_rows=self.block[0], amax=amax, key=key, stream=stream)

    def _dequantize(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Tensor:
        """Undo `_quantize` and the transform."""
        operand = self._operand(parts, usage, torch.float32, shape)
        assert operand.scale is not None and shape is not None
        values = operand.values * operand.scale[..., None, None]
        if self._rotates(usage):
            values = q.inverse_random_hadamard(values, -2)[..., : shape[-2], :]
        return values.to(dtype)

    def _operand(self, parts: Parts, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None) -> Operand:
        if shape is None:
            raise ValueError(_NO_SHAPE)
        packed, scales, amax = parts
        if usage == "rowwise":
            values = q.decode_blocks(packed, scales, shape[-1])
        else:
            rows = -(-shape[-2] // _BLOCK) * _BLOCK if self._rotates(usage) else shape[-2]
            values = q.decode_blocks(packed, scales, rows).mT
        return Operand(values.to(self.gemm_dtype(dtype)), q.global_decode(amax))

    def _scaled(self, parts: Parts, usage: Usage) -> ScaledOperand:
        data, scale_inv, amax = parts
        return ScaledOperand(data, scale_inv, "nvfp4", (1, _BLOCK), amax)

    def _transposed(self, operand: ScaledOperand, shape: Sequence[int] | None) -> ScaledOperand:
        if shape is None:
            raise ValueError(_NO_SHAPE)
        # packed values have no transposed view: the same numbers are packed along the other dimension
        data, scale_inv = q.transpose_nvfp4(operand.data, operand.scale_inv, shape[-1])
        return ScaledOperand(data, scale_inv, "nvfp4", (1, _BLOCK), operand.amax)

    def quantizes_rows(self, usage: Usage, align: int) -> bool:
        return not self.with_2d_quantization and super().quantizes_rows(usage, align)

    def quantize_rows(
        self, x: Tensor, m_splits: Tensor, key: Tensor | None = None, usages: Sequence[Usage] | None = None
    ) -> Fields:
        if self.with_2d_quantization:
            return super().quantize_rows(x, m_splits, key, usages)
        computed = [usage for usage in self._usages if usages is None or usage in usages]
        parts = q.quantize_grouped_nvfp4(
            x,
            m_splits,
            with_rht=self.with_rht,
            key=self.checked_key(key),
            rowwise="rowwise" in computed,
            columnwise="columnwise" in computed,
        )
        names = [f"{usage}_{part}" for usage in computed for part in self.PARTS]
        return dict(zip(names, parts, strict=True))

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        usage = self._usages[0]
        packed, scales, amax = [fields[f"{usage}_{part}"] for part in self.PARTS]
        if shape[0] * shape[1] == 0:
            return packed.new_empty(tuple(shape), dtype=dtype)
        rows = GroupOffsets.of(m_splits, shape[0])
        if usage == "rowwise":
            values = q.dequantize_nvfp4(packed, scales, rows.per_row(amax)[:, None], shape[1], dtype)
            return rows.zero_outside(values)
        align = self.row_block(usage)
        scale = rows.padded(align).groups().per_row(q.global_decode(amax))
        values = q.decode_blocks(packed, scales, packed.shape[1] * 2).mT * scale[:, None]
        if self.with_rht:
            values = q.inverse_random_hadamard(values, -2)
        return unpad_rows(values, rows.m_splits, align, shape[0]).to(dtype)

    def statistics(
        self, x: Tensor, key: Tensor | None = None, amax: Tensor | None = None, count: Tensor | None = None
    ) -> dict[str, Tensor]:
        parts = self._quantize(x, "rowwise", key, amax)
        values = self._dequantize(parts, "rowwise", torch.float32, x.shape)
        scale_inv = parts[1].float() * q.global_decode(parts[2])[..., None, None]
        return q.quantization_statistics(x, values, scale_inv, (1, _BLOCK), 6.0, count)
