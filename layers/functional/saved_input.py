"""What fprop saves of its input for wgrad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand
from te_models.kernels.gemm.cpu import operand_dtype

from ..quantizer import Fields, Usage
from ..quantizer.state import AnyQuantizer, value_of
from ..recipe.base import BackwardOverride
from ..tensor.storage import QuantizedStorage
from .gemm_operand import (
    GemmOperand,
    OperandsOn,
    quantized_operand,
    stored_operand,
    transposed,
)


@dataclass(frozen=True)
class SavedInput:
    """How the tensors saved for wgrad are to be read.

    form: "nothing"; "original" is the input itself, quantized for wgrad in the backward pass; "fields" are quantized
    fields; "plain" is the unquantized input, used as it is; "dequantized" are fields of fprop's operand, used
    dequantized. names: of the fields; shape: of the input. weight_names: of the weight's fields, which come last among
    the tensors; none where dgrad quantizes the weight by itself. on: of `operands_on`, what the GEMMs take.
    """

    form: Literal["nothing", "original", "fields", "plain", "dequantized"]
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    weight_names: tuple[str, ...] = ()
    on: OperandsOn = "dequantized"

    def parts(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Fields]:
        """Return what is saved of the input, and the fields of the weight."""
        count = len(tensors) - len(self.weight_names)
        return list(tensors[:count]), dict(zip(self.weight_names, tensors[count:], strict=True))

    def operand(self, quantizer: AnyQuantizer, tensors: list[Tensor], dtype: torch.dtype) -> GemmOperand:
        """Return the right operand of wgrad, [K, T]."""
        if self.form == "plain":
            return transposed(Operand(tensors[0], None), "columnwise")
        if self.form == "original":
            return quantized_operand(quantizer, tensors[0], "columnwise", dtype)
        fields = dict(zip(self.names, tensors, strict=True))
        value = value_of(quantizer)
        if self.form == "dequantized":
            return transposed(Operand(value.dequantize_fields(fields, dtype, self.shape), None), "columnwise")
        return stored_operand(value, fields, "columnwise", dtype, self.shape)


NOTHING_SAVED = SavedInput("nothing")


def quantize_and_save(
    quantizer: AnyQuantizer,
    x: Tensor | QuantizedStorage,
    dtype: torch.dtype,
    override: BackwardOverride | None,
    save_original_input: bool,
    needs_wgrad: bool,
    on: OperandsOn,
) -> tuple[GemmOperand, SavedInput, tuple[Tensor, ...]]:
    """Quantize x: [T, K] for fprop and return (its operand, how to read what is saved, what is saved).

    dtype: of the GEMMs and of x; on: of `operands_on`. x may come quantized, by this quantizer's value: then its fields
    are what is saved.

    The quantized copy is saved, a quarter or half of x's memory. In a CPU graph, formats without operations for that
    (`operand_and_fields_in_graph`) save x, and the backward pass rounds it again.
    """
    left: GemmOperand
    usage: Usage = "columnwise" if override is None else "rowwise"
    if isinstance(x, QuantizedStorage):
        fields, symmetric = x.fields, x.quantizer.symmetric
        left = stored_operand(x.quantizer, fields, "rowwise", dtype, x.shape)
    elif not needs_wgrad:
        return quantized_operand(quantizer, x, "rowwise", dtype), NOTHING_SAVED, ()
    elif override == "high_precision":
        return quantized_operand(quantizer, x, "rowwise", dtype), SavedInput("plain", on=on), (x,)
    elif override is None and (on == "traced" or save_original_input):
        usage = "rowwise" if quantizer.symmetric else usage
        stored = None if save_original_input else quantizer.operand_and_fields_in_graph(x, dtype, usage)
        if stored is None:
            return quantized_operand(quantizer, x, "rowwise", dtype), SavedInput("original", on=on), (x,)
        left, fields = stored
        return left, SavedInput("fields", tuple(fields), tuple(x.shape), on=on), tuple(fields.values())
    else:
        symmetric = quantizer.symmetric
        if on == "quantized":
            fields = quantizer.quantize_fields(x)
            left = stored_operand(value_of(quantizer), fields, "rowwise", dtype, x.shape)
        else:
            usage = "rowwise" if symmetric else usage
            left, fields = quantizer.operand_and_fields(x, operand_dtype(x.device, dtype), usage)
    if not needs_wgrad:
        return left, NOTHING_SAVED, ()
    usage = "rowwise" if symmetric else usage
    saved = {name: field for name, field in fields.items() if name.startswith(usage)}
    form = "fields" if override is None else "dequantized"
    return left, SavedInput(form, tuple(saved), tuple(x.shape), on=on), tuple(saved.values())


def quantize_weight(
    quantizer: AnyQuantizer, weight: Tensor, dtype: torch.dtype, needs_dgrad: bool
) -> tuple[GemmOperand, Fields]:
    """Quantize a plain weight [..., N, K] for fprop, on an accelerator, and return (its operand, the fields that dgrad
    will read).

    Both copies are made in one pass over the weight, where two would read it twice; a format whose
    transpose has the same numbers has one copy for both. (On CPU dgrad makes its own operand, which costs nothing there
    but the rounding.) Nothing is saved of a quantizer that was asked for one copy, or that keeps values as they
    are.
    """
    if not needs_dgrad:
        return quantized_operand(quantizer, weight, "rowwise", dtype), {}
    value = value_of(quantizer)
    both = value.symmetric or (value.rowwise and value.columnwise)
    if not both or value.KEEPS_VALUES:
        return quantized_operand(quantizer, weight, "rowwise", dtype), {}
    fields = quantizer.quantize_fields(weight)
    saved = fields_of_usage(fields, "rowwise" if value.symmetric else "columnwise")
    return stored_operand(value, fields, "rowwise", dtype, weight.shape), saved


def fields_of_usage(fields: Fields, usage: Usage) -> Fields:
    """Return the fields that are stored for one usage."""
    return {name: field for name, field in fields.items() if name.startswith(usage)}


USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")
"""Of the gradient of y, for the gradients of x and of the weight."""


def shared_gradient_operands(
    quantizer: AnyQuantizer, dy: Tensor, dtype: torch.dtype, key: Tensor | None, on: OperandsOn
) -> dict[Usage, GemmOperand]:
    """Quantize dy: [T, N] for both GEMMs that need it, on an accelerator in one pass, or where both have the same
    numbers; none where each GEMM quantizes dy as it comes to it, so that one copy is in memory at a time."""
    if on == "quantized":
        fields = quantizer.quantize_fields(dy, key)
        return {usage: stored_operand(value_of(quantizer), fields, usage, dtype, dy.shape) for usage in USAGES}
    if quantizer.symmetric:
        operand = quantized_operand(quantizer, dy, "rowwise", dtype, key)
        assert isinstance(operand, Operand)
        return {usage: transposed(operand, usage) for usage in USAGES}
    return {}
