"""What the input of a layer is encoded to: for fprop, and for wgrad from what is saved of it.

`OneMatrix` says how that is done where all rows are multiplied by one matrix, `rows` where they are sorted by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand

from ..quantizer import Fields, Usage
from ..quantizer.state import AnyQuantizer, value_of
from ..recipe.base import BackwardOverride
from ..tensor.grouped_tensor import GroupedRows
from ..tensor.storage import QuantizedStorage
from .product import GemmTarget, accumulate_product_, product, quantized_operand, stored_operand, transposed
from .scaling import Scaling
from .wgrad import WeightGradient

USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")
"""Of the gradient of y, for the gradients of x and of the weight."""


def fields_of_usage(fields: Fields, usage: Usage) -> Fields:
    """Return the fields that are stored for one usage."""
    return {name: field for name, field in fields.items() if name.startswith(usage)}


@dataclass(eq=False)
class OneMatrix:
    """Rows [T, C] as one matrix. An operand that a method returns is for the GEMMs of the same layout. offsets: the
    `GroupOffsets` of rows in groups, else None."""

    offsets: Any = None

    operand = staticmethod(quantized_operand)
    """Quantize rows for one GEMM."""
    fprop = staticmethod(product)
    """Return rows times the weight in a dtype, plus a bias."""
    dgrad = staticmethod(product)
    """Return rows times the weight in its other usage, in a dtype."""
    wgrad = staticmethod(product)
    """Return the gradient of the weight from two columnwise operands, in a dtype."""

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude, one for each scale."""
        return q.raised_amax(x, x.new_zeros((), dtype=torch.float32))

    def encode(self, quantizer: AnyQuantizer, x: Tensor, usage: Usage, to: GemmTarget) -> tuple[Any, Fields] | None:
        """Quantize rows for fprop; return (the operand, the fields that a later GEMM of `usage` reads), or None where
        x itself is stored: in a graph that a CPU runs, in a format without operations for that."""
        stored: Usage = "rowwise" if quantizer.symmetric else usage
        if to.on == "traced" and usage == "columnwise":
            return quantizer.operand_and_fields_in_graph(x, to.dtype, stored)
        if to.on != "quantized":
            return quantizer.operand_and_fields(x, to.wide, stored)
        fields = quantizer.quantize_fields(x)
        left = stored_operand(value_of(quantizer), fields, "rowwise", to.wide, x.shape)
        return left, fields_of_usage(fields, stored)

    def for_both_gemms(
        self, quantizer: AnyQuantizer, dy: Tensor, to: GemmTarget, key: Tensor | None
    ) -> dict[Usage, Any]:
        """Quantize dy once for dgrad and wgrad. Return {} if each GEMM should quantize dy itself, to keep only one copy
        in memory."""
        if to.on == "quantized":
            fields = quantizer.quantize_fields(dy, key)
            return {usage: stored_operand(value_of(quantizer), fields, usage, to.wide, dy.shape) for usage in USAGES}
        if quantizer.symmetric:
            operand = quantized_operand(quantizer, dy, "rowwise", to.wide, key)
            assert isinstance(operand, Operand)
            return {usage: transposed(operand, usage) for usage in USAGES}
        return {}

    def of_fields(
        self, quantizer: AnyQuantizer, fields: Fields, usage: Usage, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Any:
        """Return what `encode` made of rows of this shape as an operand."""
        return stored_operand(value_of(quantizer), fields, usage, dtype, shape)

    def dequantized(
        self, quantizer: AnyQuantizer, fields: Fields, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor:
        """Return the values of what `encode` made."""
        return value_of(quantizer).dequantize_fields(fields, dtype, shape)

    def rounded(self, quantizer: AnyQuantizer, x: Tensor) -> Tensor:
        """Return the values that fprop's operand of x stands for."""
        raise NotImplementedError("rows of one matrix are stored quantized for that")

    def contracted(self, x: Tensor) -> Any:
        """Return unquantized rows as the right operand of wgrad."""
        return transposed(Operand(x, None), "columnwise")

    def accumulate_(
        self, main_grads: tuple[Tensor, ...], left: Any, right: Any, members: tuple[WeightGradient, ...]
    ) -> None:
        """Add `wgrad` to the main gradients of the members that want one, or write it there."""
        accumulate_product_(main_grads[0], left, right, accumulate=not (members and members[0].overwrite))


ONE_MATRIX = OneMatrix()


@dataclass(frozen=True)
class SavedForm:
    """How what is saved of a tensor for a later GEMM is to be read.

    kind: "nothing"; "original" is the tensor itself, quantized again in the backward pass; "rounded" likewise, used as
    fprop rounded it; "rows" is a tensor that came quantized; "fields" are quantized fields; "plain" is the unquantized
    tensor, used as it is; "dequantized" are fields of fprop's operand, used dequantized. names: of the fields; shape:
    of the tensor.
    """

    kind: Literal["nothing", "original", "rounded", "rows", "fields", "plain", "dequantized"]
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    def input_operand(self, scaling: Scaling, tensors: Sequence[Tensor], rows: OneMatrix, to: GemmTarget) -> Any:
        """Return the input as the right operand of wgrad, [K, T]. tensors: what was saved of it."""
        if self.kind == "plain":
            return rows.contracted(tensors[0])
        if isinstance(tensors[0], GroupedRows):
            return rows.of_rows(tensors[0], "columnwise", to.wide)  # pyright: ignore[reportAttributeAccessIssue]
        quantizer = scaling.for_input()
        if self.kind == "original":
            return rows.operand(quantizer, tensors[0], "columnwise", to.wide)
        if self.kind == "rounded":
            return rows.contracted(rows.rounded(quantizer, tensors[0]))
        fields = dict(zip(self.names, tensors, strict=True))
        if self.kind == "dequantized":
            return rows.contracted(rows.dequantized(quantizer, fields, to.dtype, self.shape))
        return rows.of_fields(quantizer, fields, "columnwise", to.wide, self.shape)


NOTHING = SavedForm("nothing")


class EncodedTensor(NamedTuple):
    """A tensor as its GEMMs take it. operand: of fprop; form, tensors: what the operand of a later GEMM is made of."""

    operand: Any
    form: SavedForm = NOTHING
    tensors: tuple[Tensor, ...] = ()


def encode_input(
    x: Tensor | QuantizedStorage,
    quantizer: AnyQuantizer,
    rows: OneMatrix,
    to: GemmTarget,
    override: BackwardOverride | None,
    save_original_input: bool,
    needs_wgrad: bool,
) -> EncodedTensor:
    """Quantize x: [T, K] for fprop, and for wgrad if that is needed.

    to: of x's dtype and device. x may come quantized, by this quantizer's value: then its fields
    are what is saved.

    The quantized copy is saved, a quarter or half of x's memory. In a CPU graph, formats without operations for that
    save x, and the backward pass rounds it again.
    """
    usage: Usage = "columnwise" if override is None else "rowwise"
    if isinstance(x, GroupedRows):
        left = rows.of_rows(x, "rowwise", to.wide)  # pyright: ignore[reportAttributeAccessIssue]
        return EncodedTensor(left, SavedForm("rows"), (x,)) if needs_wgrad else EncodedTensor(left)
    if isinstance(x, QuantizedStorage):
        left, fields = stored_operand(x.quantizer, x.fields, "rowwise", to.wide, x.shape), x.fields
        if not needs_wgrad:
            return EncodedTensor(left)
        fields = fields_of_usage(fields, "rowwise" if x.quantizer.symmetric else usage)
    elif not needs_wgrad:
        return EncodedTensor(rows.operand(quantizer, x, "rowwise", to.wide))
    elif override == "high_precision":
        return EncodedTensor(rows.operand(quantizer, x, "rowwise", to.wide), SavedForm("plain"), (x,))
    else:
        original = override is None and save_original_input
        found = None if original else rows.encode(quantizer, x, usage, to)
        if found is None:
            form = SavedForm("original" if override is None else "rounded")
            return EncodedTensor(rows.operand(quantizer, x, "rowwise", to.wide), form, (x,))
        left, fields = found
    form = SavedForm("fields" if override is None else "dequantized", tuple(fields), tuple(x.shape))
    return EncodedTensor(left, form, tuple(fields.values()))
