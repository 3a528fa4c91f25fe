"""What a number format writes, `encode` and `operand`, and what every quantizer offers because of these two.

    encode   values [..., R, C] -> stored fields, or at once an operand of a GEMM, or both
    operand  stored fields      -> an operand of a GEMM

A format that writes only these quantizes dense and grouped layers, forward and backward, eagerly and in graphs. What it
answers beyond what was asked for saves work: an operand that needs no stored copy, both in one pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.quantize.fp8.dequantize_grouped import unpad_rows
from te_models.kernels.quantize.fp8.grouped import pad_rows, padded_length

from .group_offsets import GroupOffsets
from .tensor_types import quantize_with

Usage = Literal["rowwise", "columnwise"]
Fields = dict[str, Tensor]
Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Schema:
    """How the fields of a format lie; their parts (data, scale_inv, ...) are the quantizer's `PARTS`.

    values_per_entry: how many values an entry of `data` packs along its last dimension; scale_block: matrix entries
    (rows, columns) per stored rowwise scale, where that is not the quantizer's block; columnwise_transposed: whether
    the columnwise copy is stored as [columns, rows]; transposed_view: whether it is so by its strides, and lies in
    memory as the matrix does, which is how it is made.
    """

    values_per_entry: int = 1
    scale_block: tuple[int, int] | None = None
    columnwise_transposed: bool = True
    transposed_view: bool = False


class Scale(NamedTuple):
    """What the numbers depend on besides the values. key: int64 [2], (seed, counter), what stochastic rounding draws
    from; amaxes: of the matrices that x is a part of, by usage, where they are not x's own, see `amax_of`."""

    key: Tensor | None = None
    amaxes: Mapping[Usage, Tensor] | None = None


OWN_SCALE = Scale()


class Uses(NamedTuple):
    """What a tensor is encoded for. stored: the usages whose fields are wanted; multiplied: the usage whose operand is
    wanted now, for a GEMM in `dtype`; traced: in a graph that a CPU runs, where a format without operations that store
    its fields answers None; measured: the largest error is wanted, if it takes no second pass."""

    stored: tuple[Usage, ...] = ()
    multiplied: Usage | None = None
    dtype: torch.dtype = torch.float32
    traced: bool = False
    measured: bool = False


class RowsByGroup(NamedTuple):
    """Rows [T, C] sorted by group, each group encoded by itself. m_splits: [G] integer; align: the multiple of rows at
    which groups begin in a columnwise copy whose blocks span no rows; offsets: where groups begin at whole blocks
    already, so that x is encoded as it lies, the groups of its rows."""

    m_splits: Tensor
    align: int = 1
    offsets: GroupOffsets | None = None


class Use(NamedTuple):
    """What stored fields are read for. shape: of the matrix, [..., R, C], which packed fields do not tell; quantized:
    whether the GEMM takes quantized numbers, if there is such a form of these fields."""

    usage: Usage
    dtype: torch.dtype
    shape: Sequence[int] | None = None
    quantized: bool = False


class Encoding(NamedTuple):
    """What `encode` made. operand: where it was wanted and made without reading the fields; error: the largest
    |decoded - x|, where it was measured."""

    fields: Fields
    operand: Operand | None = None
    error: float | None = None


WHOLE_ROW = 2**62
"""As the columns of a block: all that there are."""


class NumberFormat:
    """Base of quantizers: the two methods of a format, and what follows from them."""

    FORMAT: ClassVar[str]
    BLOCK_SCALES_ONLY: ClassVar[bool] = False
    """Whether every scale belongs to one block, so that groups of whole blocks may be quantized as one matrix."""
    ENCODES_ROWS: ClassVar[bool] = False
    """Whether `encode` takes rows of groups as they come. Of a format that does not, with block scales only, groups are
    padded to whole blocks and encoded as one matrix."""
    symmetric: Any
    _usages: Any

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        """Quantize x: [..., R, C], or rows [T, C] sorted by group. Fields are named `{usage}_{part}`; None as `Uses`
        says. `encoded` is for callers that want an operand whatever the format makes of it."""
        raise NotImplementedError

    def operand(self, fields: Fields, use: Use) -> Operand | ScaledOperand:
        """Return the fields of one usage as an operand: dequantized values in the matrix's orientation, exact in their
        dtype, or the numbers themselves with the dimension that the usage contracts last. Callers use
        `operand_of_fields`."""
        raise NotImplementedError

    # --- what follows: tensors ---------------------------------------------------------------------------------------

    def quantize(self, tensor: Tensor, key: Tensor | None = None) -> Any:
        """Return a tensor [..., C] as a `QuantizedTensor` of the same logical shape.

        Leading dimensions are flattened: what is quantized is the matrix [rows, C], of a tensor without dimensions
        [1, 1]. The gradient passes unchanged. key: see `Quantizer`.
        """
        return quantize_with(self, tensor, key)

    def __call__(self, tensor: Tensor, key: Tensor | None = None) -> Any:
        """Return `quantize(tensor, key)`."""
        return self.quantize(tensor, key)

    # --- what follows: fields and operands --------------------------------------------------------------------------

    def encoded(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        """Return `encode` with the operand that is wanted, whatever the format made of it."""
        if rows is not None and not self.ENCODES_ROWS:
            if not self.BLOCK_SCALES_ONLY:
                raise ValueError(f"rows of groups cannot be quantized by {self}")
            if rows.offsets is None:
                return self.encoded_in_blocks(x, scale, uses, rows)
            rows = None
        found = self.encode(x, scale, uses, rows)
        if found is None or uses.multiplied is None or found.operand is not None:
            return found
        return self.with_operand(found, uses.multiplied, x, scale, uses, rows)

    def with_operand(
        self, found: Encoding, usage: Usage, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None
    ) -> Encoding:
        """Return what `encode` found for these arguments with the operand of a usage, read from fields."""
        stored, fields = self._stored_as(usage), found.fields
        if stored not in uses.stored:
            alone = self.encode(x, scale, Uses((stored,)), rows)
            assert alone is not None, "only a graph is refused"
            fields = alone.fields
        operand = self.operand(fields, Use(usage, uses.dtype, x.shape))
        assert isinstance(operand, Operand), "dequantized values were asked for"
        return found._replace(operand=operand)

    def encoded_in_blocks(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup) -> Encoding:
        """Encode rows of groups as a matrix for each copy, padded to whole blocks where a block spans rows."""
        fields: Fields = {}
        for usage in uses.stored:
            block = self.row_block(usage)
            found = self.encode(x if block == 1 else pad_rows(x, rows.m_splits, block), scale, Uses((usage,)), None)
            assert found is not None, "only a graph is refused"
            fields |= found.fields
        return Encoding(fields)

    def quantize_fields(
        self, x: Tensor, key: Tensor | None = None, amaxes: Mapping[Usage, Tensor] | None = None
    ) -> Fields:
        """Quantize x: [..., rows, columns] into the stored fields. key, amaxes: see `Scale`."""
        return self.encoded(x, Scale(key, amaxes), Uses(self._usages)).fields  # type: ignore[union-attr]

    def rounded(
        self, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None, rows: GroupOffsets | None = None
    ) -> Operand:
        """Quantize x for one GEMM: an operand in x's orientation, no stored copy made. rows: the groups of x [T, C],
        which begin at multiples of `row_block(usage)`: every group is quantized by itself, the scale is [G] or None."""
        groups = None if rows is None else RowsByGroup(rows.m_splits, 1, rows)
        scale, uses = Scale(key), Uses((), usage, dtype)
        if groups is not None and not self.ENCODES_ROWS:
            return self.encoded(x, scale, uses, groups).operand  # type: ignore[union-attr,return-value]
        found = self.encode(x, scale, uses, groups)
        assert found is not None, "only a graph is refused"
        operand = found.operand
        if operand is None:
            operand = self.with_operand(found, usage, x, scale, uses, groups).operand
        return operand  # type: ignore[return-value]

    def operand_of_fields(
        self,
        fields: Fields,
        usage: Usage,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        *,
        quantized: bool = False,
    ) -> Any:
        """Return stored fields as the operand of a GEMM that needs `usage`, see `Use`: an `Operand`, or where quantized
        numbers are wanted and there is such a form a `ScaledOperand`. ValueError where that copy is missing."""
        if ("rowwise" if self.symmetric else usage) not in self._usages:
            raise ValueError(
                f"this {self.FORMAT} tensor has no {usage} copy, which the GEMM needs; quantize it with {usage}=True"
            )
        return self.operand(fields, Use(usage, dtype, shape, quantized))

    def scaled_operand(self, x: Tensor, usage: Usage, key: Tensor | None = None) -> ScaledOperand | None:
        """Quantize x for one GEMM that takes quantized numbers; None where there is no such form of this usage."""
        found = self.encoded(x, Scale(key), Uses((self._stored_as(usage),)))
        operand = self.operand(found.fields, Use(usage, x.dtype, x.shape, quantized=True))  # type: ignore[union-attr]
        return operand if isinstance(operand, ScaledOperand) else None

    def quantize_rows(
        self, x: Tensor, m_splits: Tensor, key: Tensor | None = None, usages: Sequence[Usage] | None = None
    ) -> Fields:
        """Quantize x: [T, C] group by group into the stored fields. m_splits: [G] integer. usages: of the copies that
        are stored, those to make; None: all of them. ValueError in a format that does not quantize rows."""
        stored = self._usages if usages is None else tuple([usage for usage in self._usages if usage in usages])
        return self.encoded(x, Scale(key), Uses(stored), RowsByGroup(m_splits)).fields  # type: ignore[union-attr]

    def rows_for_gemms(
        self, x: Tensor, m_splits: Tensor, usages: Sequence[Usage], align: int, key: Tensor | None = None
    ) -> dict[Usage, Fields]:
        """Quantize x: [T, C] group by group, in one pass for all usages, and return for each the fields that a GEMM
        takes, under the names of its `member`. align: see `RowsByGroup`."""
        if self.symmetric and self.BLOCK_SCALES_ONLY:
            return dict.fromkeys(usages, self.quantize_rows(x, m_splits, key))
        found = self.encoded(x, Scale(key), Uses(tuple(usages)), RowsByGroup(m_splits, align)).fields  # type: ignore[union-attr]
        if len(usages) == 1 and not self.symmetric:
            return {usages[0]: found}
        return {usage: self._of_member(found, usage) for usage in usages}

    def quantizes_rows(self, usage: Usage, align: int) -> bool:
        """Whether `rows_for_gemms` makes the copy for a usage, with blocks of as many rows as are aligned."""
        stored = "rowwise" if self.symmetric else usage
        return stored in self._usages and (usage == "rowwise" or self.row_block(usage) in (1, align))

    def row_block(self, usage: Usage) -> int:
        """Return how many rows one scale spans, so that grouped rows are aligned to it; 1 for one scale per matrix."""
        raise NotImplementedError

    def _stored_as(self, usage: Usage) -> Usage:
        return "rowwise" if self.symmetric else usage

    def _of_member(self, fields: Fields, usage: Usage) -> Fields:
        """Return the fields of one usage as the quantizer that makes them names them."""
        stored = self._stored_as(usage)
        return {f"{stored}{name[len(usage) :]}": field for name, field in fields.items() if name.startswith(usage)}


def grouped_values(values: Tensor, m_splits: Tensor, rows: int, align: int) -> Tensor:
    """Return rows [T, C], zero past the last group, of values that lie in groups at multiples of `align`."""
    if align > 1:
        return unpad_rows(values, m_splits, align, rows)
    return GroupOffsets.of(m_splits, rows).zero_outside(values)


def padded_row_count(rows: int, m_splits: Tensor, align: int) -> int:
    """Return how many rows a copy in groups at multiples of `align` has."""
    return rows if align == 1 else padded_length(rows, m_splits.shape[0], align)
