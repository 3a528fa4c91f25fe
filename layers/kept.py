"""What fprop leaves of its input for wgrad, and the statistics of what it quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand

from .delayed import ROLES, STATISTICS, Float8Quantizer
from .quantizer import Quantizer
from .recipe import BackwardOverride
from .row_groups import RowGroups

AnyQuantizer = Quantizer | Float8Quantizer


@dataclass(frozen=True)
class Kept:
    """How the tensors kept for wgrad are to be read.

    form: "nothing"; "original" is the input itself, quantized for wgrad in the backward pass; "fields" are quantized
    fields; "plain" is the unquantized input, used as it is; "dequantized" are fields of fprop's operand, used
    dequantized. names: of the fields; shape: of the input.
    """

    form: Literal["nothing", "original", "fields", "plain", "dequantized"]
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    def operand(self, quantizer: AnyQuantizer, tensors: list[Tensor], dtype: torch.dtype) -> Operand:
        """Return the right operand of wgrad, [T, K]."""
        if self.form == "plain":
            return Operand(tensors[0], None)
        if self.form == "original":
            return quantizer.operand(tensors[0], "columnwise", dtype)
        fields = dict(zip(self.names, tensors, strict=True))
        value = quantizer.value if isinstance(quantizer, Float8Quantizer) else quantizer
        if self.form == "dequantized":
            return Operand(value.dequantize_fields(fields, dtype, self.shape), None)
        return value.operand_of_fields(fields, "columnwise", dtype, self.shape)


def keep(
    quantizer: AnyQuantizer,
    x: Tensor,
    override: BackwardOverride | None,
    save_original_input: bool,
    needs_wgrad: bool,
) -> tuple[Operand, Kept, tuple[Tensor, ...]]:
    """Quantize x: [T, K] for fprop and return (its operand, how to read what is kept, what is kept).

    Eagerly the quantized copy is kept, a quarter or half of x's memory. In a CPU graph the compiler decides what
    crosses to the backward pass, and deriving both copies from x lets it fuse quantization and dequantization.
    """
    if not needs_wgrad:
        return quantizer.operand(x, "rowwise", x.dtype), Kept("nothing"), ()
    if override == "high_precision":
        return quantizer.operand(x, "rowwise", x.dtype), Kept("plain"), (x,)
    fused = torch.compiler.is_compiling() and x.device.type == "cpu"
    if override is None and (save_original_input or fused):
        return quantizer.operand(x, "rowwise", x.dtype), Kept("original"), (x,)
    value = quantizer.value if isinstance(quantizer, Float8Quantizer) else quantizer
    fields = quantizer.quantize_fields(x)
    left = value.operand_of_fields(fields, "rowwise", x.dtype, x.shape)
    wanted = "rowwise" if value.symmetric or override is not None else "columnwise"
    kept = {name: field for name, field in fields.items() if name.startswith(wanted)}
    form = "fields" if override is None else "dequantized"
    return left, Kept(form, tuple(kept), tuple(x.shape)), tuple(kept.values())


def note_statistics(
    statistics: Tensor,
    role: str,
    quantizer: AnyQuantizer,
    x: Tensor,
    key: Tensor | None = None,
    rows: RowGroups | None = None,
) -> None:
    """Write the statistics of quantizing x into the role's row of `statistics` [R, 5]. rows: the groups of x, whose
    scales differ under delayed scaling; other formats' statistics are those of x as one matrix."""
    x = x.detach()
    if isinstance(quantizer, Float8Quantizer) and rows is not None:
        found = quantizer.bound_to_rows(rows).statistics(x[:, None, :])
    else:
        found = quantizer.statistics(x, key)
    statistics[ROLES.index(role)].copy_(torch.stack([found[name].float() for name in STATISTICS]))
