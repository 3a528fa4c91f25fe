"""One quantized tensor for all experts: weights of one shape (`GroupedTensor`), or rows by expert (`GroupedRows`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import Operand
from te_models.kernels.torch_versions import equal_values
from te_models.suggestions import shown

from ..quantizer import Fields, Quantizer, Usage
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.group_offsets import GroupOffsets, check_row_counts
from ..quantizer.state import value_of
from ..quantizer.tensor_types import TENSOR_TYPES
from .formats import CLASSES, TENSOR_CLASSES
from .grouped_storage import GroupedTensorStorage, empty_rows, member_of_rows
from .quantized_tensor import QuantizedTensor, unless


class GroupedTensor(QuantizedTensor):
    """A quantized tensor of logical shape [num_gemms, rows, columns]; every member has its own scales.

    A field is the stack of the members' fields along a new first dimension, so a member (`g[i]`, `unbind(0)`,
    `split`) is a view of the fields, and moving between this and the per-GEMM layout moves bytes, never numbers. Raises
    ValueError for members of different shapes, dtypes or quantizers.
    """

    RANK = 3

    @property
    def num_gemms(self) -> int:
        """The number of members."""
        return self.shape[0]

    def member(self, index: int) -> QuantizedTensor:
        """Return member `index` as a per-GEMM tensor that shares this tensor's storage."""
        self.require_matrix("be indexed by member")
        fields = {name: field[index] for name, field in self.fields.items()}
        return self.view_of(
            fields, shape=self.shape[1:], cls=TENSOR_CLASSES.get(self.quantizer.FORMAT, QuantizedTensor)
        )

    def members(self) -> list[QuantizedTensor]:
        """Return all members, sharing this tensor's storage."""
        return [self.member(i) for i in range(self.num_gemms)]

    def to_storage(self) -> GroupedTensorStorage:
        """Return the bare fields, shared. ValueError for a view of another shape."""
        self.require_matrix("be turned into a storage")
        return GroupedTensorStorage(self.fields, self.quantizer, self.shape, self.dtype)

    @classmethod
    def from_members(cls, members: list[QuantizedTensor]) -> GroupedTensor:
        """Stack per-GEMM tensors of one shape, dtype and quantizer; ValueError where they differ."""
        first = members[0]
        for i, member in enumerate(members):
            if (member.shape, member.dtype, member.quantizer) != (first.shape, first.dtype, first.quantizer):
                raise ValueError(f"member {i} is {shown(member)}; allowed: shape, dtype and quantizer of member 0")
        fields = {n: torch.stack([m.fields[n] for m in members]) for n in first.quantizer.field_names()}
        return cls(fields, first.quantizer, torch.Size((len(members), *first.shape)), first.dtype)


class GroupedRows(QuantizedTensor):
    """A quantized tensor of logical shape [T, columns]: rows sorted by group, every group with its own scales.

    `m_splits`: [num_gemms] integer, rows per group, a tensor on the device that is never read on the host; rows past
    the last group are zero. Fields: see `grouped_storage`. Writes use the present splits; `quantize_` takes new ones.
    Members are views, for callers that know the splits. Raises ValueError for values or splits of another shape.
    """

    m_splits: Tensor

    @classmethod
    def quantize_rows(
        cls, x: Tensor, m_splits: Tensor, quantizer: Quantizer | Float8Quantizer, key: Tensor | None = None
    ) -> Self:
        """Return x: [T, columns] quantized; m_splits: [num_gemms] integer; key: for stochastic rounding."""
        if x.dim() != cls.RANK:
            raise ValueError(f"{cls.__name__} holds {cls.RANK}-D tensors; got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{cls.__name__} quantizes floating-point tensors; got {x.dtype}")
        _check_splits(m_splits, x.shape[0])
        fields = quantizer.quantize_rows(x.detach(), m_splits, key)
        return cls(fields | {"m_splits": m_splits}, value_of(quantizer), x.shape, x.dtype)

    @classmethod
    def quantize(cls, x: Tensor, quantizer: Quantizer | Float8Quantizer, key: Tensor | None = None) -> Self:
        raise ValueError("rows of groups are quantized with their splits; call GroupedRows.quantize_rows")

    @classmethod
    def empty(
        cls,
        shape: torch.Size,
        quantizer: Quantizer,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        groups: int = 1,
    ) -> Self:
        """Return an uninitialised tensor, all of whose `groups` are empty."""
        fields = empty_rows(quantizer, torch.Size(shape), groups, device, dtype)
        m_splits = torch.zeros(groups, dtype=torch.int64, device=device)
        return cls(fields | {"m_splits": m_splits}, quantizer, torch.Size(shape), dtype)

    def _adopt(self, fields: Fields, quantizer: Quantizer, matrix_shape: torch.Size) -> None:
        super()._adopt(fields, quantizer, matrix_shape)
        if "m_splits" in fields:  # absent where the copies change and the rows stay
            self.m_splits = fields["m_splits"]

    @property
    def num_gemms(self) -> int:
        """The number of groups."""
        return self.m_splits.shape[0]

    # --- values ----------------------------------------------------------------------------------------------------

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self.quantizer.dequantize_rows(self.fields, self.m_splits, self.matrix_shape, dtype)

    @torch.no_grad()
    def quantize_(
        self, x: Tensor, *, noop: Tensor | None = None, key: Tensor | None = None, m_splits: Tensor | None = None
    ) -> Self:
        """Overwrite with x, quantized again (or, for rows quantized alike, with their very fields and splits).

        x: of this tensor's shape. m_splits: new splits (None: the present ones, or x's own where it has some). noop: a
        scalar tensor; where it is nonzero nothing changes, decided on the device. key: for stochastic rounding.
        """
        if x.shape != self.shape:
            raise ValueError(f"cannot quantize shape {tuple(x.shape)} into a tensor of shape {tuple(self.shape)}")
        if m_splits is None:
            m_splits = x.m_splits if isinstance(x, GroupedRows) else self.m_splits
        elif m_splits.shape != self.m_splits.shape:
            raise ValueError(f"m_splits has shape {tuple(m_splits.shape)}; allowed: {tuple(self.m_splits.shape)}")
        if isinstance(x, GroupedRows) and equal_values(x.quantizer, self.quantizer) and m_splits is x.m_splits:
            source = x.fields
        else:
            _check_splits(m_splits, x.shape[0])
            values = x.dequantize(torch.float32) if isinstance(x, QuantizedTensor) else x
            source = self.quantizer.quantize_rows(values, m_splits, key)
        for name, field in (self.fields | {"m_splits": self.m_splits}).items():
            new = m_splits.to(field.dtype) if name == "m_splits" else source[name]
            field.copy_(new if noop is None else unless(noop, new.to(field.device), field))
        return self._written()

    # --- members and operands --------------------------------------------------------------------------------------

    def members(self, splits: Sequence[int] | None = None) -> list[QuantizedTensor]:
        """Return the groups as per-GEMM tensors that share this tensor's storage: their rows quantized by themselves.

        splits: the values of `m_splits`; they may be left out on the CPU only, where reading them makes nobody wait.
        """
        if splits is None:
            if self.device.type != "cpu":
                raise ValueError("members of rows on a device need their splits from the host; pass splits, a list")
            splits = self.m_splits.tolist()
        if len(splits) != self.num_gemms:
            raise ValueError(f"splits has {len(splits)} entries; allowed: {self.num_gemms}, one per group")
        cls, found = TENSOR_CLASSES.get(self.quantizer.FORMAT, QuantizedTensor), []
        for i, rows in enumerate(splits):
            fields = member_of_rows(self.quantizer, self.fields, splits, i)
            found.append(cls(fields, self.quantizer, torch.Size((rows, self.shape[1])), self.dtype))
        return found

    def operand(self, usage: Usage, dtype: torch.dtype) -> Operand:
        """Return the rows as an operand of a grouped GEMM, in the rows of `operand_groups(usage)`; its scale is [G]."""
        self.require_matrix("be the operand of a GEMM")
        groups = self.operand_groups(usage)
        rows = groups.group.shape[0]
        return self.quantizer.operand_of_fields(self.fields, usage, dtype, (rows, self.shape[1]))

    def operand_groups(self, usage: Usage) -> GroupOffsets:
        """Return where the groups lie in the copy for `usage`: in padded rows if its blocks span rows."""
        rows, align = GroupOffsets.of(self.m_splits, self.shape[0]), self.quantizer.row_block(usage)
        return rows if align == 1 else rows.padded(align).groups()

    def to_storage(self) -> GroupedTensorStorage:
        """Return the bare fields, shared. ValueError for a view of another shape."""
        self.require_matrix("be turned into a storage")
        return GroupedTensorStorage(self.fields, self.quantizer, self.shape, self.dtype, self.m_splits)

    # --- copies and the subclass protocol --------------------------------------------------------------------------

    def require_cuttable(self, what: str) -> None:
        raise ValueError(
            f"a {type(self).__name__} of shape {tuple(self.shape)} cannot {what}, because only the device knows "
            "where its groups begin; call members(splits), or dequantize() for its values"
        )

    def wrap(self, fields: Fields, **changes: Any) -> Any:
        if changes.get("shape", self.shape) != self.shape:
            self.require_cuttable(f"be viewed as {tuple(changes['shape'])}")
        return super().wrap({"m_splits": self.m_splits} | fields, **changes)

    def map_fields(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        fields = {name: function(field) for name, field in self.fields.items()}
        return self.wrap(fields | {"m_splits": function(self.m_splits)}, dtype=dtype or self.dtype)

    def empty_like(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        new = super().empty_like(device, dtype)
        new.m_splits = self.m_splits.to(device=device, copy=True)
        return new

    def new_empty_of(self, shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> Self:
        return type(self).empty(shape, self.quantizer, dtype, device, self.num_gemms)

    def _inner_names(self) -> list[str]:
        return [*super()._inner_names(), "m_splits"]

    @classmethod
    def _expected(cls, inner: Fields, quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype) -> Fields:
        m_splits = inner.get("m_splits")
        if m_splits is None or m_splits.dim() != 1:
            raise ValueError(f"the field m_splits is {m_splits}; expected: one integer per group")
        _check_splits(m_splits, shape[0])
        return empty_rows(quantizer, shape, m_splits.shape[0], "meta", dtype)


def _check_splits(m_splits: Tensor, rows: int) -> None:
    """Raise ValueError for splits of a wrong kind; their values are looked at where that makes nobody wait."""
    if m_splits.dim() != 1 or m_splits.shape[0] == 0 or m_splits.is_floating_point() or m_splits.dtype is torch.bool:
        kind = f"{m_splits.dtype} of shape {tuple(m_splits.shape)}"
        raise ValueError(f"m_splits is {kind}; allowed: a one-dimensional integer tensor, one entry per group")
    if not compiling():  # a graph's layers look at what they are given
        check_row_counts(m_splits, rows)


TENSOR_TYPES["grouped"] = GroupedTensor
CLASSES[GroupedTensor.__name__] = GroupedTensor
CLASSES[GroupedRows.__name__] = GroupedRows
