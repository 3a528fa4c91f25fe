"""A different format for each usage, for example E4M3 in fprop and E5M2 where the tensor meets a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.suggestions import shown

from .base import Fields, Quantizer, Usage
from .group_offsets import GroupOffsets
from .identity import IdentityQuantizer
from .value import derived, value_class


@value_class
@dataclass(frozen=True, kw_only=True)
class HybridQuantizer(Quantizer):
    """Rowwise operands come from one quantizer and columnwise operands from another.

    Each of the two quantizers makes the copy of its usage only. Fields: the fields of each quantizer under the usage
    that it serves; a symmetric format in the columnwise usage stores its one copy, untransposed, as columnwise_*.
    Raises ValueError for a quantizer that is itself hybrid, and for anything that is no Quantizer.
    """

    FORMAT: ClassVar[str] = "hybrid"

    rowwise_quantizer: Quantizer = field(default_factory=IdentityQuantizer)
    columnwise_quantizer: Quantizer = field(default_factory=IdentityQuantizer)

    def __post_init__(self) -> None:
        super().__post_init__()
        for usage in ("rowwise", "columnwise"):
            name = f"{usage}_quantizer"
            held = getattr(self, name)
            if not isinstance(held, Quantizer) or isinstance(held, HybridQuantizer):
                raise ValueError(f"{name} is {shown(held)}; allowed: a quantizer of one format")
            # here and not where it is used: a compiled graph cannot make new quantizers
            held = held.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
            object.__setattr__(self, name, held)

    @derived
    def symmetric(self) -> bool:
        return False

    @derived
    def block(self) -> None:
        return None

    def member(self, usage: Usage) -> Quantizer:
        """Return the quantizer of a usage."""
        return self.rowwise_quantizer if usage == "rowwise" else self.columnwise_quantizer

    @derived
    def transformed(self) -> bool:
        return self.columnwise_quantizer.transformed

    @derived
    def random_signs(self) -> bool:
        return self.columnwise_quantizer.random_signs

    def square_blocks(self, usage: Usage) -> bool:
        return self.member(usage).square_blocks(usage)

    def of_transpose(self) -> None:
        return None  # the copies have two formats

    def emulated_kind(self, usage: Usage) -> str | None:
        return self.member(usage).emulated_kind(usage)

    def _stored(self, usage: Usage) -> tuple[Quantizer, Usage]:
        """Return the quantizer of a usage and the usage it stores its copy as."""
        member = self.member(usage)
        return member, member._usages[0]

    def needs_key(self) -> bool:
        return self.rowwise_quantizer.needs_key() or self.columnwise_quantizer.needs_key()

    def row_block(self, usage: Usage) -> int:
        return self.member(usage).row_block(usage)

    @derived
    def exact_in_bfloat16(self) -> bool:
        of_usage = {"rowwise": self.rowwise_quantizer, "columnwise": self.columnwise_quantizer}
        return all(of_usage[usage].exact_in_bfloat16 for usage in self._usages)

    def field_names(self) -> tuple[str, ...]:
        return tuple([f"{usage}_{part}" for usage in self._usages for part in self.member(usage).PARTS])

    def operand(self, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None) -> Operand:
        return self.member(usage).operand(x, usage, dtype, key)

    def rows_operand(
        self, x: Tensor, usage: Usage, dtype: torch.dtype, rows: GroupOffsets, key: Tensor | None = None
    ) -> Operand:
        return self.member(usage).rows_operand(x, usage, dtype, rows, key)

    def scaled_operand(self, x: Tensor, usage: Usage, key: Tensor | None = None) -> ScaledOperand | None:
        return self.member(usage).scaled_operand(x, usage, key)

    def amax_of(self, x: Tensor, usage: Usage) -> Tensor | None:
        return self.member(usage).amax_of(x, self._stored(usage)[1])

    def quantize_fields(
        self, x: Tensor, key: Tensor | None = None, amaxes: Mapping[Usage, Tensor] | None = None
    ) -> Fields:
        fields: Fields = {}
        for usage in self._usages:
            member, stored = self._stored(usage)
            own_amaxes: dict[Usage, Tensor] | None = {stored: amaxes[usage]} if amaxes and usage in amaxes else None
            for name, value in member.quantize_fields(x, key, own_amaxes).items():
                fields[f"{usage}_{name.partition('_')[2]}"] = value
        return fields

    def operand_and_fields(
        self, x: Tensor, dtype: torch.dtype, usage: Usage, key: Tensor | None = None
    ) -> tuple[Operand, Fields]:
        fields = {name: field for name, field in self.quantize_fields(x, key).items() if name.startswith(usage)}
        if usage == "rowwise":
            return self.operand_of_fields(fields, usage, dtype, x.shape), fields
        return self.operand(x, "rowwise", dtype, key), fields

    def _member_fields(self, fields: Fields, usage: Usage) -> tuple[Quantizer, Fields]:
        """Return the quantizer of a usage and the fields under the names it gave them."""
        member, stored = self._stored(usage)
        return member, {f"{stored}_{part}": fields[f"{usage}_{part}"] for part in member.PARTS}

    def quantize_rows(
        self, x: Tensor, m_splits: Tensor, key: Tensor | None = None, usages: Sequence[Usage] | None = None
    ) -> Fields:
        fields: Fields = {}
        for usage in self._usages if usages is None else usages:
            for name, value in self.member(usage).quantize_rows(x, m_splits, key).items():
                fields[f"{usage}_{name.partition('_')[2]}"] = value
        return fields

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        member, fields = self._member_fields(fields, self._usages[0])
        return member.dequantize_rows(fields, m_splits, shape, dtype)

    def quantizes_rows(self, usage: Usage, align: int) -> bool:
        return self.member(usage).quantizes_rows(usage, align)

    def quantize_rows_for_gemms(
        self, x: Tensor, m_splits: Tensor, usages: Sequence[Usage], align: int, key: Tensor | None = None
    ) -> dict[Usage, Fields]:
        found: dict[Usage, Fields] = {}
        for usage in usages:
            found |= self.member(usage).quantize_rows_for_gemms(x, m_splits, (usage,), align, key)
        return found

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        member, fields = self._member_fields(fields, self._usages[0])
        return member.dequantize_fields(fields, dtype, shape)

    def operand_of_fields(
        self, fields: Fields, usage: Usage, dtype: torch.dtype, shape: Sequence[int] | None = None
    ) -> Operand:
        member, fields = self._member_fields(fields, self._stored_for(usage))
        return member.operand_of_fields(fields, usage, dtype, shape)

    def scaled_operand_of_fields(
        self, fields: Fields, usage: Usage, shape: Sequence[int] | None = None
    ) -> ScaledOperand | None:
        member, fields = self._member_fields(fields, self._stored_for(usage))
        return member.scaled_operand_of_fields(fields, usage, shape)

    def statistics(
        self, x: Tensor, key: Tensor | None = None, amax: Tensor | None = None, count: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self.rowwise_quantizer.statistics(x, key, amax, count)

    def rows_statistics(self, x: Tensor, rows: GroupOffsets, key: Tensor | None = None) -> dict[str, Tensor]:
        return self.rowwise_quantizer.rows_statistics(x, rows, key)

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        return Quantizer.from_dict(value) if name.endswith("_quantizer") else value
