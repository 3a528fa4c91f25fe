"""A different format for each usage, for example E4M3 in fprop and E5M2 where the tensor meets a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.suggestions import shown

from .base import Quantizer
from .encoding import Encoding, Fields, RowsByGroup, Scale, Usage, Use, Uses
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
    ENCODES_ROWS: ClassVar[bool] = True

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

    def of_transpose(self) -> None:
        return None  # the copies have two formats

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

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding | None:
        if uses.traced:
            return None
        fields: Fields = {}
        for usage in uses.stored:
            member, stored = self._stored(usage)
            amaxes: dict[Usage, Tensor] | None = None
            if scale.amaxes and usage in scale.amaxes:
                amaxes = {stored: scale.amaxes[usage]}
            found = member.encoded(x, Scale(scale.key, amaxes), Uses((stored,)), rows)
            assert found is not None, "only a graph is refused"
            for name, value in found.fields.items():
                fields[f"{usage}_{name.partition('_')[2]}"] = value
        usage = uses.multiplied
        if usage is None or usage in uses.stored:
            return Encoding(fields)
        alone = self.member(usage).encoded(x, scale, Uses((), usage, uses.dtype), rows)
        assert alone is not None, "only a graph is refused"
        return Encoding(fields, alone.operand)

    def operand(self, fields: Fields, use: Use) -> Operand | ScaledOperand:
        member, fields = self._member_fields(fields, use.usage)
        return member.operand(fields, use)

    def amax_of(self, x: Tensor, usage: Usage) -> Tensor | None:
        return self.member(usage).amax_of(x, self._stored(usage)[1])

    def _member_fields(self, fields: Fields, usage: Usage) -> tuple[Quantizer, Fields]:
        """Return the quantizer of a usage and the fields under the names it gave them."""
        member, stored = self._stored(usage)
        return member, {f"{stored}_{part}": fields[f"{usage}_{part}"] for part in member.PARTS}

    def dequantize_rows(self, fields: Fields, m_splits: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        member, fields = self._member_fields(fields, self._usage_in(fields))
        return member.dequantize_rows(fields, m_splits, shape, dtype)

    def quantizes_rows(self, usage: Usage, align: int) -> bool:
        return self.member(usage).quantizes_rows(usage, align)

    def rows_for_gemms(
        self, x: Tensor, m_splits: Tensor, usages: Sequence[Usage], align: int, key: Tensor | None = None
    ) -> dict[Usage, Fields]:
        found: dict[Usage, Fields] = {}
        for usage in usages:
            found |= self.member(usage).rows_for_gemms(x, m_splits, (usage,), align, key)
        return found

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        member, fields = self._member_fields(fields, self._usage_in(fields))
        return member.dequantize_fields(fields, dtype, shape)

    def statistics(
        self, x: Tensor, key: Tensor | None = None, amax: Tensor | None = None, count: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self.rowwise_quantizer.statistics(x, key, amax, count)

    def rows_statistics(self, x: Tensor, rows: GroupOffsets, key: Tensor | None = None) -> dict[str, Tensor]:
        return self.rowwise_quantizer.rows_statistics(x, rows, key)

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        return Quantizer.from_dict(value) if name.endswith("_quantizer") else value
