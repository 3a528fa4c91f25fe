"""Rows sorted by group, and what follows from that for quantizing them and for the three GEMMs.

`Groups`: every group is multiplied by its own matrix and quantized by itself: per-tensor scales are one per group, and
blocks that span rows stay inside their group, by means of a padded copy. `AlignedGroups` are groups that need no such
copy: each has a multiple of `row_align` rows, filled up with zeros, so no block spans two groups as the rows lie, and
they are quantized as one matrix.

Where GEMMs take quantized numbers, rows are quantized once for all the GEMMs that take them: one kernel makes both
copies from the splits on the device, the padding that wgrad's copy needs included. Eagerly on a CPU the input is, too,
so that its quantized copy is saved and not itself. In a CPU graph, and for gradients on a CPU, every operand is made
from a padded copy of the rows (`Groups._apart`).

T rows, P padded rows, C columns, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand
from te_models.kernels.quantize.cpu import fields as cpu_fields

from ..quantizer import Fields, Usage
from ..quantizer.encoding import OWN_SCALE, Uses
from ..quantizer.group_offsets import PaddedRows
from ..quantizer.state import AnyQuantizer, value_of
from ..recipe.base import GemmQuantizers
from ..tensor.grouped_tensor import GroupedRows
from .product import (
    GemmOperand,
    GemmTarget,
    accumulate_rows_wgrad_,
    emulating,
    in_cpu_graph,
    quantized_gemms,
    rows_product,
    rows_wgrad,
    stored_operand,
    transposed,
)
from .three_gemms import USAGES, OneMatrix
from .wgrad import WeightGradient

MIN_ROW_ALIGNMENT = 16
"""Rows that grouped GEMMs on an accelerator want groups to begin at a multiple of, where they are contracted."""


def row_alignment(quantizers: GemmQuantizers, device: torch.device) -> int:
    """Return the multiple of rows at which groups begin in the operands of wgrad."""
    return max(quantizers.row_align, MIN_ROW_ALIGNMENT) if quantized_gemms(device) else quantizers.row_align


class AlignedGroups(OneMatrix):
    """Rows sorted by group, in groups of whole blocks, so that they are quantized as one matrix. `permute_quantized`
    makes such rows and quantizes them in the same pass, so that the permuted rows never reach memory in high precision.
    They are for formats with blocks of one row, on accelerators, in layers without a bias: a bias would give values to
    rows that are only padding."""

    def amax(self, x: Tensor) -> Tensor:
        return self.offsets.amax(x)

    def fprop(self, left: Any, weight: GemmOperand, dtype: torch.dtype, bias: None = None) -> Tensor:  # type: ignore[override]
        return rows_product(left, None, weight, self.offsets, dtype)

    def dgrad(self, left: Any, weight: GemmOperand, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return rows_product(left, None, weight, self.offsets, dtype, dgrad=True)

    def sizes(self) -> Tensor:
        """Return how many rows each group has in the operands of wgrad."""
        return self.offsets.m_splits

    def wgrad(self, left: Any, right: Any, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return rows_wgrad(left, right, self.sizes(), dtype)

    def accumulate_(
        self, main_grads: tuple[Tensor, ...], left: Any, right: Any, members: tuple[WeightGradient, ...]
    ) -> None:
        if main_grads[0].dim() == 3:
            accumulate = not (members and members[0].overwrite)
            accumulate_rows_wgrad_(main_grads[0], left, right, self.sizes(), accumulate=accumulate)
            return
        # main gradients that lie apart, each [N, K], by way of one float32 tensor: the kernels write to one
        grouped = main_grads[0].new_empty((len(members), *main_grads[0].shape), dtype=torch.float32)
        accumulate_rows_wgrad_(grouped, left, right, self.sizes(), accumulate=False)
        wanted = [(member, dw) for member, dw in zip(members, grouped.unbind(0), strict=True) if member.wanted]
        for main_grad, (member, dw) in zip(main_grads, wanted, strict=True):
            if member.overwrite:
                main_grad.copy_(dw)
            else:
                main_grad.add_(dw)


class _Padded(NamedTuple):
    """Rows as the left operand of fprop or dgrad. padding: where they lie; None: in the T rows that came in."""

    operand: GemmOperand
    padding: PaddedRows | None


@dataclass(eq=False)
class Groups(AlignedGroups):
    """Rows sorted by group. align: the multiple of rows at which groups begin in the operands of wgrad, see
    `row_alignment`; dtype: of rows that are dequantized."""

    align: int = 1
    dtype: torch.dtype = torch.float32
    _padded: dict[int, PaddedRows] = field(default_factory=dict)

    def padding(self, align: int) -> PaddedRows | None:
        """Return where rows lie in groups that begin at multiples of `align`; None: as they came."""
        if align == 1:
            return None
        if align not in self._padded:
            self._padded[align] = self.offsets.padded(align)
        return self._padded[align]

    def sizes(self) -> Tensor:
        padding = self.padding(self.align)
        return self.offsets.m_splits if padding is None else padding.sizes

    def fprop(self, left: Any, weight: GemmOperand, dtype: torch.dtype, bias: None = None) -> Tensor:
        return rows_product(*left, weight, self.offsets, dtype)  # pyright: ignore[reportCallIssue]

    def dgrad(self, left: Any, weight: GemmOperand, dtype: torch.dtype) -> Tensor:
        return rows_product(*left, weight, self.offsets, dtype, dgrad=True)  # pyright: ignore[reportCallIssue]

    def operand(  # type: ignore[override]
        self, quantizer: AnyQuantizer, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None
    ) -> Any:
        if quantized_gemms(x.device) and quantizer.quantizes_rows(usage, self.align):
            fields = quantizer.rows_for_gemms(x, self.offsets.m_splits, (usage,), self.align, key)
            return self.of_fields(quantizer, fields[usage], usage, dtype, x.shape)
        return self._apart(quantizer, x, usage, key)

    def _padding_of(self, quantizer: AnyQuantizer, usage: Usage) -> PaddedRows | None:
        align = self.align if usage == "columnwise" else quantizer.row_block("rowwise")
        return None if align == 1 else self.padding(align)

    def _apart(self, quantizer: AnyQuantizer, x: Tensor, usage: Usage, key: Tensor | None = None) -> Any:
        """Quantize rows for one GEMM, from a padded copy where it wants one."""
        padding, offsets = self._padding_of(quantizer, usage), self.offsets
        if padding is not None:
            x, offsets = padding.pad(x), padding.groups()
        operand: GemmOperand | None = None
        if not quantized_gemms(x.device):
            operand = quantizer.rounded(x, usage, self.dtype, key, offsets)
            operand = operand if usage == "rowwise" else transposed(operand, usage)
        else:
            member = quantizer.member(usage)
            if member.BLOCK_SCALES_ONLY:  # the blocks are inside the groups already
                operand = member.scaled_operand(x, usage, key)
            if operand is None:
                operand = emulating(quantizer, quantizer.rounded(x, usage, self.dtype, key, offsets), usage)
        return operand if usage == "columnwise" else _Padded(operand, padding)

    def encode(self, quantizer: AnyQuantizer, x: Tensor, usage: Usage, to: GemmTarget) -> tuple[Any, Fields] | None:
        if not quantizer.quantizes_rows(usage, self.align):
            return None
        if to.on == "traced":
            return None if usage == "rowwise" else self._encode_in_graph(quantizer, x)
        splits = self.offsets.m_splits
        if usage == "columnwise" and not quantizer.symmetric and cpu_fields.chosen(x) is Backend.COMPILED:
            # C++ rounds rows in one pass, faster than decoding a stored copy of them
            left = self._apart(quantizer, x, "rowwise")
            by_usage = quantizer.rows_for_gemms(x, splits, ("columnwise",), self.align)
        else:
            usages: tuple[Usage, ...] = ("rowwise",) if usage == "rowwise" else USAGES
            by_usage = quantizer.rows_for_gemms(x, splits, usages, self.align)
            left = self.of_fields(quantizer, by_usage["rowwise"], "rowwise", to.wide, x.shape)
        return left, by_usage[usage]

    def _encode_in_graph(self, quantizer: AnyQuantizer, x: Tensor) -> tuple[Any, Fields] | None:
        # None where the copy might take as much memory as x, for being padded
        value = value_of(quantizer)
        if value.symmetric or not (value.BLOCK_SCALES_ONLY and in_cpu_graph(x.device)):
            return None
        if not statically_known_true(self.offsets.num_groups * self.align <= x.shape[0]):
            return None
        padding = self.padding(self.align)
        uses = Uses(("columnwise",), traced=True)
        found = value.encoded(x if padding is None else padding.pad(x), OWN_SCALE, uses)
        return None if found is None else (self._apart(quantizer, x, "rowwise"), found.fields)

    def for_both_gemms(
        self, quantizer: AnyQuantizer, dy: Tensor, to: GemmTarget, key: Tensor | None
    ) -> dict[Usage, Any]:
        if to.on != "quantized":  # equal copies side by side are one copy in a graph
            shared = USAGES if quantizer.symmetric and to.on == "traced" else ()
            return {usage: self._apart(quantizer, dy, usage, key) for usage in shared}
        together: list[Usage] = [usage for usage in USAGES if quantizer.quantizes_rows(usage, self.align)]
        fields: dict[Usage, Fields] = {}
        if together:
            fields = quantizer.rows_for_gemms(dy, self.offsets.m_splits, together, self.align, key)
        return {
            usage: self.of_fields(quantizer, fields[usage], usage, to.wide, dy.shape)
            if usage in fields
            else self._apart(quantizer, dy, usage, key)
            for usage in USAGES
        }

    def of_fields(
        self, quantizer: AnyQuantizer, fields: Fields, usage: Usage, dtype: torch.dtype, shape: Sequence[int]
    ) -> Any:
        padding = self._padding_of(quantizer, usage)
        rows = shape[0] if padding is None else padding.used.shape[0]
        operand = stored_operand(value_of(quantizer.member(usage)), fields, usage, dtype, (rows, shape[1]))
        return operand if usage == "columnwise" else _Padded(operand, padding)

    def dequantized(self, quantizer: AnyQuantizer, fields: Fields, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        value = value_of(quantizer.member("rowwise"))
        return value.dequantize_rows(fields, self.offsets.m_splits, torch.Size(shape), dtype)

    def rounded(self, quantizer: AnyQuantizer, x: Tensor) -> Tensor:
        padding = self._padding_of(quantizer, "rowwise")
        inside = self.offsets if padding is None else padding.groups()
        operand = quantizer.rounded(x if padding is None else padding.pad(x), "rowwise", self.dtype, None, inside)
        values = operand.values
        if operand.scale is not None:
            values = values.float() * inside.per_row(operand.scale)[:, None]
        return (values if padding is None else padding.unpad(values)).to(self.dtype)

    def contracted(self, x: Tensor) -> Any:
        padding = self.padding(self.align)
        return transposed(Operand(x if padding is None else padding.pad(x), None), "columnwise")

    def of_rows(self, x: GroupedRows, usage: Usage, dtype: torch.dtype) -> Any:
        """Return rows that came quantized as an operand: of fprop, or the right one of wgrad, [K, P]."""
        fields, block = x.fields, x.quantizer.row_block(usage)
        padding = self.padding(block if usage == "rowwise" else self.align)
        if usage == "columnwise" and padding is not None and block == 1:
            # in the rows that came in: one copy, or a hybrid's own. FP8 cannot be indexed everywhere; its bytes can
            name = "rowwise_data" if x.quantizer.symmetric else "columnwise_data"
            data = fields[name]
            words = data.view(torch.uint8) if data.dtype.itemsize == 1 else data
            fields = fields | {name: padding.pad(words).view(data.dtype)}
        rows = x.shape[0] if padding is None else padding.used.shape[0]
        operand = stored_operand(x.quantizer, fields, usage, dtype, (rows, x.shape[1]))
        return operand if usage == "columnwise" else _Padded(operand, padding)
