"""The three GEMMs of a layer under a recipe, and what their operands are encoded to; nothing here knows of autograd.

T rows, K in, N out; in a layer of groups, every group of rows has its own weight. The operands are quantized:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

`fprop` encodes both of its operands, with what a later GEMM will read of them; `gradients` reads that. `OneMatrix` says
how it is done where all rows are multiplied by one matrix, `rows` where they are sorted by group. Live state (scales,
amaxes, main gradients) comes in as tensors and is written in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand
from te_models.kernels.without_autocast import without_autocast

from ..quantizer import Fields, Usage
from ..quantizer.encoding import OWN_SCALE, Uses
from ..quantizer.state import AnyQuantizer, value_of
from ..recipe.base import HIGH_PRECISION, BackwardOverride
from ..tensor.grouped_tensor import GroupedRows
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedFields, QuantizedStorage
from .double_backward import first_derivative
from .product import (
    GemmOperand,
    GemmTarget,
    accumulate_product_,
    dequantized,
    in_cpu_graph,
    product,
    quantized_operand,
    scaled_values,
    stored_operand,
    target,
    transposed,
)
from .scaling import Scaling
from .weight_format import check_format, check_operands
from .wgrad import WeightGradient, run_wgrad

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
        if to.on != "quantized":
            traced = to.on == "traced" and usage == "columnwise"
            uses = Uses((stored,), "rowwise", to.wide, traced)
            found = quantizer.encode(x, OWN_SCALE, uses)
            if found is not None and found.operand is None:
                found = quantizer.with_operand(found, "rowwise", x, OWN_SCALE, uses)
            return None if found is None else (found.operand, found.fields)
        fields = quantizer.quantize_fields(x)
        left = stored_operand(value_of(quantizer), fields, "rowwise", to.wide, x.shape)
        return left, fields_of_usage(fields, stored)

    def for_both_gemms(
        self, quantizer: AnyQuantizer, dy: Tensor, to: GemmTarget, key: Tensor | None
    ) -> dict[Usage, Any]:
        """Quantize dy once for dgrad and wgrad. Return {} if each GEMM should quantize dy itself, which keeps only one
        copy in memory."""
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
    form: SavedForm
    tensors: tuple[Tensor, ...]


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
        return EncodedTensor(left, SavedForm("rows"), (x,)) if needs_wgrad else EncodedTensor(left, NOTHING, ())
    if isinstance(x, QuantizedStorage):
        left, fields = stored_operand(x.quantizer, x.fields, "rowwise", to.wide, x.shape), x.fields
        if not needs_wgrad:
            return EncodedTensor(left, NOTHING, ())
        fields = fields_of_usage(fields, "rowwise" if x.quantizer.symmetric else usage)
    elif not needs_wgrad:
        return EncodedTensor(rows.operand(quantizer, x, "rowwise", to.wide), NOTHING, ())
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


# --- the weight ------------------------------------------------------------------------------------------------------

Weights = tuple[Tensor, ...]
"""One [N, K] or [G, N, K], or G of [N, K], plain or quantized."""


def stacked(weights: Weights) -> Tensor | QuantizedStorage:
    """Return the weights of groups as one tensor [G, N, K]; quantized ones exactly as they are stored."""
    first = weights[0]
    if first.dim() == 3:
        return first
    if not isinstance(first, QuantizedTensor):
        return stacked_values(weights)
    names = first.quantizer.field_names()
    with without_autocast(first.fields[names[0]]):  # torch.amp.autocast refuses to stack eight-bit numbers
        fields = {name: torch.stack([w.fields[name] for w in weights]) for name in names}  # type: ignore[attr-defined]
    return QuantizedStorage(fields, first.quantizer, torch.Size((len(weights), *first.shape)), first.dtype)


def stacked_values(weights: Weights) -> Tensor:
    """Return the weights of groups as one tensor [G, N, K]; quantized members are dequantized."""
    if weights[0].dim() == 3:
        return weights[0]
    return torch.stack([w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights])


def plain_weights(weights: Weights, dtype: torch.dtype, *, groups: bool) -> Tensor:
    """Return the weights' high-precision values as one tensor, [N, K] or of groups [G, N, K]."""
    values = [w.dequantize(dtype) if isinstance(w, QuantizedTensor) else w.to(dtype) for w in weights]
    return torch.stack(values) if groups and values[0].dim() == 2 else values[0]


def encode_weight(
    weight: Tensor | QuantizedStorage, scaling: Scaling, to: GemmTarget, needs_dgrad: bool
) -> EncodedTensor:
    """Quantize a weight [..., N, K] for fprop, and on an accelerator for dgrad if that is needed; a stored one is taken
    as it is.

    Both copies are made in one pass over the weight, where two would read it twice; a format whose transpose has the
    same numbers has one copy for both. (On CPU dgrad makes its own operand, which costs nothing there but the
    rounding.) Nothing is saved of a quantizer that was asked for one copy, or that keeps values as they are.
    """
    quantizers = scaling.config.quantizers
    if isinstance(weight, QuantizedFields):
        if quantizers is not HIGH_PRECISION:
            check_operands(weight.quantizer, quantizers, needs_dgrad)
            return EncodedTensor(weight_operand(weight, scaling, "rowwise", to.wide), NOTHING, ())
        weight = weight.dequantize(to.dtype)  # no recipe is in force that it has to fit
    quantizer = quantizers.weight if scaling.state.scale is None else scaling.for_weight(records=True)
    if to.on != "quantized":
        return EncodedTensor(quantized_operand(quantizer, weight, "rowwise", to.wide), NOTHING, ())
    value = value_of(quantizer)
    both = value.symmetric or (value.rowwise and value.columnwise)
    if quantizers.backward_override or not needs_dgrad or not both or value.KEEPS_VALUES:
        return EncodedTensor(quantized_operand(quantizer, weight, "rowwise", to.wide), NOTHING, ())
    fields = quantizer.quantize_fields(weight)
    saved = fields_of_usage(fields, "rowwise" if value.symmetric else "columnwise")
    operand = stored_operand(value, fields, "rowwise", to.wide, weight.shape)
    return EncodedTensor(operand, SavedForm("fields", tuple(saved), tuple(weight.shape)), tuple(saved.values()))


def dgrad_weight(
    weights: Weights,
    cached: QuantizedTensor | None,
    form: SavedForm,
    tensors: Sequence[Tensor],
    rows: OneMatrix,
    scaling: Scaling,
    to: GemmTarget,
) -> GemmOperand:
    """Return the weight as the right operand of dgrad: from what `encode_weight` saved, quantized again, or in high
    precision, as the recipe's backward override says."""
    override = scaling.config.quantizers.backward_override
    if override == "high_precision":
        return transposed(
            Operand(plain_weights(weights, to.dtype, groups=rows.offsets is not None), None), "columnwise"
        )
    if form.names:
        fields = dict(zip(form.names, tensors, strict=True))
        return stored_operand(value_of(scaling.for_weight()), fields, "columnwise", to.wide, form.shape)
    if cached is not None:
        weight: Tensor | QuantizedStorage = cached
    else:
        weight = weights[0] if rows.offsets is None else stacked(weights)
    if override is None:
        return weight_operand(weight, scaling, "columnwise", to.wide)
    rowwise = weight_operand(weight, scaling, "rowwise", to.wide)
    return transposed(Operand(scaled_values(dequantized(rowwise, to.dtype), to.dtype), None), "columnwise")


def weight_operand(
    weight: Tensor | QuantizedStorage, scaling: Scaling, usage: Usage, dtype: torch.dtype
) -> GemmOperand:
    """Return a weight as an operand of a GEMM: a stored one exactly as it is, a high-precision one quantized now.

    Raises ValueError where the stored format is not the recipe's.
    """
    if isinstance(weight, QuantizedFields):
        check_format(weight.quantizer, scaling.config.quantizers.weight)
        weight.require_matrix("be the operand of a GEMM")
        return stored_operand(weight.quantizer, weight.fields, usage, dtype, weight.matrix_shape)
    live = scaling.for_weight()
    if usage == "columnwise" and live.symmetric and in_cpu_graph(weight.device):
        # fprop's numbers, rounded again: as a stack of one, or the graph would store fprop's in 16 bits for dgrad
        again = live.rounded(weight[None], usage, dtype)
        left = again.scale if again.scale is None or again.scale.dim() < weight.dim() - 1 else again.scale[0]
        return transposed(Operand(again.values[0], left), usage)
    return quantized_operand(live, weight, usage, dtype)


# --- the GEMMs -------------------------------------------------------------------------------------------------------


class Forms(NamedTuple):
    """How `gradients` reads the tensors that `fprop` saved, first of the input, then of the weight, and what the GEMMs
    take."""

    to: GemmTarget
    x: SavedForm
    weight: SavedForm


def fprop(
    x: Tensor | QuantizedStorage,
    weights: Weights,
    bias: Tensor | None,
    cached: QuantizedTensor | None,
    rows: OneMatrix,
    scaling: Scaling,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Forms, tuple[Tensor, ...]]:
    """Return (`x w^T + b` [T, N], how to read what is saved, what is saved).

    x: [T, K] in `dtype`, or already quantized by the input quantizer; cached: the weights quantized in an earlier
    micro-batch; rows: how the rows of x lie; bias: None in a layer of groups; needs: whether the gradients of x and of
    the weights will be wanted.
    """
    quantizers, options, _ = scaling.config
    to, weight = target(x.device, dtype), cached
    if weight is None:
        weight = weights[0] if rows.offsets is None else stacked(weights)
    if scaling.state.statistics is not None:
        scaling.record_statistics(x, weight, rows.offsets)
    saving = (quantizers.backward_override, options.save_original_input, needs[1])
    of_input = quantizers.input if scaling.state.scale is None else scaling.for_input(records=True)
    left = encode_input(x, of_input, rows, to, *saving)
    right = encode_weight(weight, scaling, to, needs[0])
    y = rows.fprop(left.operand, right.operand, dtype, bias)
    return y, Forms(to, left.form, right.form), (*left.tensors, *right.tensors)


def gradients(
    dy: Tensor,
    weights: Weights,
    cached: QuantizedTensor | None,
    main_grads: tuple[Tensor, ...],
    rows: OneMatrix,
    scaling: Scaling,
    forms: Forms,
    tensors: list[Tensor],
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Return the gradients of x and of each weight of `fprop`, those that are needed and go to autograd.

    dy: [T, N]; main_grads: one for each weight that has a gradient, where the options want them; forms, tensors: from
    `fprop`.
    """
    quantizers, options, _ = scaling.config
    override, key, to = quantizers.backward_override, scaling.state.key, forms.to
    count = len(tensors) - len(forms.weight.names)
    quantizer = scaling.for_gradient(dy, rows.amax, rows.offsets)
    of_dy: dict[Usage, Any] = rows.for_both_gemms(quantizer, dy, to, key) if all(needs) else {}
    dx: Tensor | None = None
    dw: tuple[Tensor | None, ...] = (None,) * len(weights)
    if needs[0]:
        right = dgrad_weight(weights, cached, forms.weight, tensors[count:], rows, scaling, to)
        # the copy of dy ends with the call, before wgrad makes its own
        dx = rows.dgrad(
            of_dy["rowwise"] if of_dy else rows.operand(quantizer, dy, "rowwise", to.wide, key), right, to.dtype
        )
    if needs[1]:
        left = of_dy["columnwise"] if of_dy else rows.operand(quantizer, dy, "columnwise", to.wide, key)
        right = forms.x.input_operand(scaling, tensors[:count], rows, to)
        wgrad = options.wgrad

        def compute() -> tuple[Tensor | None, ...]:
            if main_grads:
                rows.accumulate_(main_grads, left, right, wgrad.each() if wgrad else ())
                return (None,) * len(weights)
            found = rows.wgrad(left, right, weights[0].dtype)
            return (found,) if found.dim() == weights[0].dim() else found.unbind(0)

        dw = run_wgrad(wgrad, weights, (left, right), compute)
    if not torch.is_grad_enabled():
        return dx, dw
    # of a backward pass that could itself be differentiated
    dw = tuple([first_derivative(gradient, override, dy, *tensors) for gradient in dw])
    return first_derivative(dx, override, dy, *weights), dw
