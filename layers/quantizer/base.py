"""The base of quantizers: what a format declares and defines, and what follows from it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import Operand
from te_models.kernels.gemm.few_rows import IntegerOperand
from te_models.kernels.quantize import QuantizedOutput
from te_models.kernels.torch_versions import equal_values, register_constants
from te_models.suggestions import shown

from .encoding import (
    WHOLE_ROW,
    Fields,
    NumberFormat,
    Parts,
    Scale,
    Schema,
    Usage,
    Use,
    Uses,
    grouped_values,
    padded_row_count,
)
from .group_offsets import GroupOffsets
from .tensor_types import TENSOR_TYPES
from .value import ValueObject, WithUsages, derived


@dataclass(frozen=True, kw_only=True)
class Quantizer(NumberFormat, ValueObject):
    """Base of all quantizers. rowwise, columnwise: which copies `quantize` makes.

    key, in every method that takes one: int64 [2], (seed, counter), what stochastic rounding draws from; formats that
    round to nearest ignore it. shape: the matrix's logical [..., rows, columns], because packed fields do not tell it.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("data", "scale_inv")
    """What is stored for a usage; the field of a part is named `{usage}_{part}`."""
    SCHEMA: ClassVar[Schema] = Schema()
    NEEDS_STATE: ClassVar[bool] = False
    """Whether it scales by tensors that a module keeps, see `QuantizerState`."""
    KEEPS_VALUES: ClassVar[bool] = False
    """Whether what it stores are the values themselves, in high precision."""
    SIGNED_SCALES: ClassVar[bool] = False
    """Whether a scale may be negative or zero."""
    LATER_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields that files name only where they are not at their defaults, since they came after the first files."""

    rowwise: bool = True
    columnwise: bool = True

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError("a quantizer needs at least one usage: rowwise or columnwise")

    # --- what a format declares, beside `encode` and `operand` --------------------------------------------------------

    @derived
    def symmetric(self) -> bool:
        """Whether the transpose has the same numbers, so that one stored copy serves both usages."""
        return False

    @derived
    def block(self) -> tuple[int, int] | None:
        """The rowwise block (rows, columns); None for one scale per matrix."""
        raise NotImplementedError

    def part_dtype(self, part: str) -> torch.dtype | None:
        """Return the dtype of a part; None where it is the quantized tensor's dtype."""
        raise NotImplementedError

    def largest(self) -> float:
        """Return the largest number of `data`, beyond which values are clamped."""
        # no attribute: the compiler takes a float for a variable as soon as a second quantizer has another
        return float("inf")

    # --- what a format may refine: what a kernel does in one step, and what is special --------------------------------

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        """Return the values the fields stand for: [..., rows, columns]."""
        operand = self.operand(fields, Use(self._usage_in(fields), dtype, shape))
        assert isinstance(operand, Operand), "dequantized values were asked for"
        values = operand.values
        return (values if operand.scale is None else values.float() * operand.scale[..., None, None]).to(dtype)

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the values of what `quantize_rows` made of x of this shape: [T, C] in `dtype`; rows past the last
        group are zero."""
        align = self.row_block(self._usage_in(fields))
        lie = (padded_row_count(shape[0], m_splits, align), shape[1])
        return grouped_values(self.dequantize_fields(fields, dtype, lie), m_splits, shape[0], align)

    def scales(self, fields: Fields) -> Tensor:
        """Return what decoding multiplies the numbers of each block with, of rowwise fields, float32."""
        scale_inv = fields["rowwise_scale_inv"]
        return q.e8m0_to_float(scale_inv) if scale_inv.dtype == torch.uint8 else scale_inv.float()

    def amax_of(self, x: Tensor, usage: Usage) -> Tensor | None:
        """Return the amax [...] that the one scale of a matrix comes from; None in a format without such a scale."""
        return None

    def needs_key(self) -> bool:
        """Whether it rounds stochastically and so draws from a key."""
        return False

    def member(self, usage: Usage) -> Quantizer:
        """Return the quantizer that makes the copy of a usage: this one, but for a format that is made of two."""
        return self

    @derived
    def transformed(self) -> bool:
        """Whether the columnwise copy holds the random Hadamard transform; a rowwise one never is."""
        return False

    @derived
    def row_scaled(self) -> bool:
        """Whether the amax is taken per row of the rowwise copy and not over the matrix."""
        return False

    @derived
    def random_signs(self) -> bool:
        """Whether that transform has its random signs: operands cancel only against their like."""
        return True

    @derived
    def keeps_rows(self) -> bool:
        """Whether a row has the same values wherever it is quantized, and when it is quantized a second time: its
        blocks lie within it, and their scales are powers of two."""
        return False

    @derived
    def exact_in_bfloat16(self) -> bool:
        """Whether this format's operand values are exact in bfloat16."""
        return True

    def of_transpose(self) -> Quantizer | None:
        """Return the quantizer of the transpose, whose rowwise copy is this one's columnwise one; None where no field
        of the original could serve it."""
        return self if self.symmetric else self.with_usage(rowwise=self.columnwise, columnwise=self.rowwise)

    def output(self) -> QuantizedOutput | None:
        """Return how another operation makes this format's fields of its result [T, C] as its last step; None in a
        format that has to see the whole result first."""
        return None

    def fields_of_output(self, copies: Sequence[Tensor]) -> Fields:
        """Return what an operation made as `output` says, as fields."""
        raise NotImplementedError

    def integer_operand(self, fields: Fields, shape: Sequence[int]) -> IntegerOperand | None:
        """Return stored integers of matrices [..., R, C] as a CPU multiplies few rows by them; None: no integers."""

    # --- what follows from it --------------------------------------------------------------------------------------

    @derived
    def _usages(self) -> tuple[Usage, ...]:
        if self.symmetric:
            return ("rowwise",)
        both: tuple[Usage, Usage] = ("rowwise", "columnwise")
        return both if self.rowwise and self.columnwise else both[:1] if self.rowwise else both[1:]

    @derived
    def _columnwise_block(self) -> tuple[int, int] | None:
        """The columnwise block in the tensor's own orientation."""
        return None if self.block is None else (self.block[1], self.block[0])

    def stored_usages(self) -> tuple[Usage, ...]:
        """Return the usages whose fields are stored."""
        return self._usages

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the stored fields, in storage order."""
        return tuple([f"{usage}_{part}" for usage in self._usages for part in self.PARTS])

    def named(self, parts: Sequence[Tensor], usages: Sequence[Usage]) -> Fields:
        """Return the parts of these usages, in storage order, by the names of their fields."""
        fields: Fields = {}
        for i, part in enumerate(parts):
            usage, name = divmod(i, len(self.PARTS))
            fields[f"{usages[usage]}_{self.PARTS[name]}"] = part
        return fields

    def parts_of(self, fields: Fields, usage: Usage) -> Parts:
        """Return the fields of the copy that serves a usage, in storage order."""
        stored = self._stored_as(usage)
        return [fields[f"{stored}_{part}"] for part in self.PARTS]

    def _usage_in(self, fields: Fields) -> Usage:
        """Return the usage that values are read from: the first that is stored, of fields that lack it the other."""
        first = self._usages[0]
        other: Usage = "columnwise" if first == "rowwise" else "rowwise"
        return first if f"{first}_data" in fields else other

    def _block_of(self, usage: Usage) -> tuple[int, int]:
        """Return the block of a usage in the tensor's own orientation."""
        block = self.block if usage == "rowwise" else self._columnwise_block
        assert block is not None, "one scale per matrix has no blocks"
        return block

    def row_block(self, usage: Usage) -> int:
        block = self.block if usage == "rowwise" else self._columnwise_block
        return 1 if block is None else block[0]

    def square_blocks(self, usage: Usage) -> bool:
        """Whether the copy of a usage has blocks that no GEMM multiplies by another operand's of the kind: 128x128."""
        return self.member(usage).block == (128, 128)

    def emulated_kind(self, usage: Usage) -> str | None:
        """Return what a GEMM on dequantized values of this usage stands in for; None for values that are not
        quantized."""
        member = self.member(usage)
        return None if member.KEEPS_VALUES else member.FORMAT

    def gemm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which this format's operand values are exact, given the compute dtype."""
        return torch.bfloat16 if dtype == torch.bfloat16 and self.exact_in_bfloat16 else torch.float32

    def amaxes(self, x: Tensor) -> dict[Usage, Tensor]:
        """Return `amax_of` x for every stored usage that has one: what parts of one matrix must agree on."""
        found: dict[Usage, Tensor | None] = {usage: self.amax_of(x, usage) for usage in self.stored_usages()}
        return {usage: amax for usage, amax in found.items() if amax is not None}

    def statistics(
        self, x: Tensor, key: Tensor | None = None, amax: Tensor | None = None, count: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what quantizing x rowwise does to it: amax, scale_min, scale_max, underflow and saturation, float32
        scalars on its device (see `quantization_statistics`). amax: what `amax_of` gave, or a larger one; count: of
        elements, less where x is padded."""
        amaxes: dict[Usage, Tensor] | None = None if amax is None else {"rowwise": amax}
        fields = self.encode(x, Scale(key, amaxes), Uses(("rowwise",))).fields  # type: ignore[union-attr]
        values = self.dequantize_fields(fields, torch.float32, x.shape)
        block = self.SCHEMA.scale_block or self.block
        if block is not None and block[1] == WHOLE_ROW:
            block = (block[0], max(1, x.shape[-1]))
        return q.block_statistics(x, values, self.scales(fields), block, self.largest(), count)

    def rows_statistics(self, x: Tensor, rows: GroupOffsets, key: Tensor | None = None) -> dict[str, Tensor]:
        """Return `statistics` of rows sorted by group, x: [T, C], every group quantized by itself."""
        x, count, align = rows.zero_outside(x), rows.count() * x.shape[1], self.row_block("rowwise")
        if align > 1:
            padding = rows.padded(align)
            x, rows = padding.pad(x), padding.groups()
        # as matrices of so few rows that each lies within one group
        amax = rows.per_row(rows.amax(x))[::align]
        return self.statistics(x.view(x.shape[0] // align, align, x.shape[1]), key, amax, count)

    # --- tensors -----------------------------------------------------------------------------------------------------

    def quantize_grouped(self, x: Tensor, key: Tensor | None = None) -> Any:
        """Return x: [num_gemms, rows, columns] as one `GroupedTensor`, every member with its own scales."""
        return TENSOR_TYPES["grouped"].quantize(x, self, key)

    def same_numbers(self, other: Quantizer) -> bool:
        """Whether what `other` has quantized has the numbers that this one makes: they differ in their copies at most.
        A graph cannot make new quantizers to compare, so there quantizers that differ in that count as different."""
        if equal_values(self, other):
            return True
        if compiling():
            return False
        both = {"rowwise": True, "columnwise": True}
        return self.with_usage(**both) == other.with_usage(**both)

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Self:
        """Return a copy that makes other copies; in a compiled function, too."""
        if register_constants is not None and compiling():  # which traces what makes a quantizer
            return WithUsages(self, rowwise, columnwise).value  # type: ignore[return-value]
        return dataclasses.replace(self, rowwise=rowwise, columnwise=columnwise)

    def require_storable(self) -> None:
        """Raise ValueError where `from_dict` could not read what `to_dict` writes: a user's class with additional
        fields or another format."""
        from . import QUANTIZERS

        known = {f.name for f in dataclasses.fields(QUANTIZERS[self.FORMAT])} if self.FORMAT in QUANTIZERS else set()
        own = [f.name for f in dataclasses.fields(self) if f.name not in known]
        if own:
            raise ValueError(
                f"a tensor quantized by {type(self).__name__} cannot be saved: files of the format {self.FORMAT!r} do "
                f"not know {', '.join(own)}; save its dequantize()d values"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return {"format": ..., field: plain JSON value}."""
        fields = [f for f in dataclasses.fields(self) if f.name not in self.LATER_FIELDS]
        fields += [
            f for f in dataclasses.fields(self) if f.name in self.LATER_FIELDS and getattr(self, f.name) != f.default
        ]
        return {"format": self.FORMAT} | {f.name: _to_json(getattr(self, f.name)) for f in fields}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Quantizer:
        """Rebuild from `to_dict`; ValueError names an unknown format, field or dtype, or a value of another type than
        its field's."""
        from . import QUANTIZERS

        values = dict(values)
        name = values.pop("format", None)
        if not isinstance(name, str) or name not in QUANTIZERS:
            raise ValueError(f"quantized format is {shown(name)}; allowed: {', '.join(map(repr, QUANTIZERS))}")
        cls = QUANTIZERS[name]
        known = {f.name: type(f.default) for f in dataclasses.fields(cls)}
        for field, value in values.items():
            if field not in known:
                raise ValueError(f"{cls.__name__} has no field {field!r}; its fields are: {', '.join(sorted(known))}")
            wanted = known[field]
            if wanted in (bool, int, float) and type(value) not in (wanted, int if wanted is float else wanted):
                raise ValueError(
                    f"{cls.__name__} has {field} = {str(value)[:40]}; allowed: a value of {wanted.__name__}"
                )
        return cls(**{field: cls._from_json(field, value) for field, value in values.items()})

    @classmethod
    def _from_json(cls, field: str, value: Any) -> Any:
        """Undo `_to_json` for one field."""
        return value


def _to_json(value: Any) -> Any:
    if isinstance(value, Quantizer):
        return value.to_dict()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.value if isinstance(value, enum.Enum) else value
