"""What fprop leaves of its input for wgrad, and the statistics of what it quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import Operand

from ..quantizer import Fields, IdentityQuantizer, Usage
from ..quantizer.delayed import STATISTICS, value_of
from ..quantizer.group_offsets import RowGroups
from ..recipe.base import BackwardOverride
from ..tensor.storage import QuantizedStorage
from .gemm_operand import AnyQuantizer, Side, quantized_gemms, side, side_of_fields, turned


@dataclass(frozen=True)
class Kept:
    """How the tensors kept for wgrad are to be read.

    form: "nothing"; "original" is the input itself, quantized for wgrad in the backward pass; "fields" are quantized
    fields; "plain" is the unquantized input, used as it is; "dequantized" are fields of fprop's operand, used
    dequantized. names: of the fields; shape: of the input. weight_names: of the weight's fields, which come last among
    the tensors; none where dgrad quantizes the weight by itself.
    """

    form: Literal["nothing", "original", "fields", "plain", "dequantized"]
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    weight_names: tuple[str, ...] = ()

    def parts(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Fields]:
        """Return what is kept of the input, and the fields of the weight."""
        count = len(tensors) - len(self.weight_names)
        return list(tensors[:count]), dict(zip(self.weight_names, tensors[count:], strict=True))

    def side(self, quantizer: AnyQuantizer, tensors: list[Tensor], dtype: torch.dtype) -> Side:
        """Return the right side of wgrad, [K, T]."""
        if self.form == "plain":
            return turned(Operand(tensors[0], None), "columnwise")
        if self.form == "original":
            return side(quantizer, tensors[0], "columnwise", dtype)
        fields = dict(zip(self.names, tensors, strict=True))
        value = value_of(quantizer)
        if self.form == "dequantized":
            return turned(Operand(value.dequantize_fields(fields, dtype, self.shape), None), "columnwise")
        return side_of_fields(value, fields, "columnwise", dtype, self.shape)


def keep(
    quantizer: AnyQuantizer,
    x: Tensor | QuantizedStorage,
    dtype: torch.dtype,
    override: BackwardOverride | None,
    save_original_input: bool,
    needs_wgrad: bool,
) -> tuple[Side, Kept, tuple[Tensor, ...]]:
    """Quantize x: [T, K] for fprop and return (its side, how to read what is kept, what is kept).

    dtype: of the GEMMs and of x. x may come quantized, by this quantizer's value: then its fields are what is kept.

    Eagerly the quantized copy is kept, a quarter or half of x's memory. In a CPU graph the compiler decides what
    crosses to the backward pass, and deriving both copies from x lets it fuse quantization and dequantization.
    """
    value = value_of(quantizer)
    if isinstance(x, QuantizedStorage):
        fields, value = x.fields, x.quantizer
    elif not needs_wgrad:
        return side(quantizer, x, "rowwise", dtype), Kept("nothing"), ()
    elif override == "high_precision":
        return side(quantizer, x, "rowwise", dtype), Kept("plain"), (x,)
    elif override is None and (save_original_input or in_cpu_graph(x.device)):
        return side(quantizer, x, "rowwise", dtype), Kept("original"), (x,)
    else:
        fields = quantizer.quantize_fields(x)
    left = side_of_fields(value, fields, "rowwise", dtype, x.shape)
    if not needs_wgrad:
        return left, Kept("nothing"), ()
    wanted = "rowwise" if value.symmetric or override is not None else "columnwise"
    kept = {name: field for name, field in fields.items() if name.startswith(wanted)}
    form = "fields" if override is None else "dequantized"
    return left, Kept(form, tuple(kept), tuple(x.shape)), tuple(kept.values())


def keep_weight(quantizer: AnyQuantizer, weight: Tensor, dtype: torch.dtype, needs_dgrad: bool) -> tuple[Side, Fields]:
    """Quantize a plain weight [..., N, K] for fprop and return (its side, the fields that dgrad will read).

    On an accelerator both copies are made in one pass over the weight, where two would read it twice; a format whose
    transpose has the same numbers has one copy for both. On CPU dgrad makes its own operand, which costs nothing there
    but the rounding, and nothing is kept; nor of a quantizer that was asked for one copy.
    """
    value = value_of(quantizer)
    both = value.symmetric or (value.rowwise and value.columnwise)
    if not (needs_dgrad and both and quantized_gemms(weight.device)) or isinstance(value, IdentityQuantizer):
        return side(quantizer, weight, "rowwise", dtype), {}
    fields = quantizer.quantize_fields(weight)
    wanted = "rowwise" if value.symmetric else "columnwise"
    kept = {name: field for name, field in fields.items() if name.startswith(wanted)}
    return side_of_fields(value, fields, "rowwise", dtype, weight.shape), kept


def in_cpu_graph(device: torch.device) -> bool:
    """Whether the compiler is at work for a device whose GEMMs take dequantized values, which it fuses."""
    return compiling() and not quantized_gemms(device)


def gradient_sides(
    quantizer: AnyQuantizer, dy: Tensor, usages: tuple[Usage, ...], dtype: torch.dtype, key: Tensor | None
) -> dict[Usage, Side]:
    """Quantize dy: [T, N] for the GEMMs that need it, on an accelerator in one pass."""
    if len(usages) == 2 and quantized_gemms(dy.device):
        fields = quantizer.quantize_fields(dy, key)
        return {usage: side_of_fields(value_of(quantizer), fields, usage, dtype, dy.shape) for usage in usages}
    return {usage: side(quantizer, dy, usage, dtype, key) for usage in usages}


def note_statistics(
    noted: Tensor,
    quantizer: AnyQuantizer,
    x: Tensor,
    key: Tensor | None = None,
    rows: RowGroups | None = None,
) -> None:
    """Write the statistics of quantizing x into `noted` [5]. rows: the groups of x, each of which is quantized by
    itself; without them x is a matrix, or a stack of matrices."""
    x = x.detach()
    found = quantizer.statistics(x, key) if rows is None else quantizer.rows_statistics(x, rows, key)
    noted.copy_(torch.stack([found[name].float() for name in STATISTICS]))
