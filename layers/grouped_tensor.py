"""One quantized tensor for all experts: weights of one shape, or the rows of each expert's tokens."""

from __future__ import annotations

import torch

from .quantized_tensor import CLASSES, TENSOR_CLASSES, QuantizedTensor


class GroupedTensor(QuantizedTensor):
    """A quantized tensor of logical shape [num_gemms, rows, columns]; every member has its own scales.

    A field is the stack of the members' fields along a new first dimension, so a member (`g[i]`, `unbind(0)`,
    `split`) is a view of the fields, and moving between this and the per-GEMM layout moves bytes, never numbers.
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
        return TENSOR_CLASSES[self.quantizer.FORMAT](fields, self.quantizer, self.shape[1:], self.dtype)

    def members(self) -> list[QuantizedTensor]:
        """Return all members, sharing this tensor's storage."""
        return [self.member(i) for i in range(self.num_gemms)]

    @classmethod
    def from_members(cls, members: list[QuantizedTensor]) -> GroupedTensor:
        """Stack per-GEMM tensors of one shape, dtype and quantizer; ValueError where they differ."""
        first = members[0]
        for i, member in enumerate(members):
            if (member.shape, member.dtype, member.quantizer) != (first.shape, first.dtype, first.quantizer):
                raise ValueError(f"member {i} is {member!r}; allowed: the same shape, dtype and quantizer as member 0")
        fields = {n: torch.stack([m.fields[n] for m in members]) for n in first.quantizer.field_names()}
        return cls(fields, first.quantizer, torch.Size((len(members), *first.shape)), first.dtype)


CLASSES[GroupedTensor.__name__] = GroupedTensor
