"""The weight as an operand: encoded for fprop and dgrad, or taken as it is stored, in whatever form that is.

GEMMs read a stored weight as it is. Another format is an error. The same format in other numbers (blocks of another
shape, scales of another kind, another FP8 dtype) runs, as a model whose weights came with float32 scales shall run
under a recipe that makes powers of two; it warns once, and `recipe_report` says what is stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import Operand
from te_models.kernels.torch_versions import constant_when_traced, equal_values, register_constants
from te_models.kernels.without_autocast import without_autocast

from ..quantizer import Quantizer, Usage
from ..quantizer.state import value_of
from ..recipe.base import HIGH_PRECISION, GemmQuantizers, refuse_transformed, refuse_two_dimensional
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedFields, QuantizedStorage
from .encode import EncodedTensor, OneMatrix, SavedForm, fields_of_usage
from .product import (
    GemmOperand,
    GemmTarget,
    dequantized,
    in_cpu_graph,
    quantized_operand,
    scaled_values,
    stored_operand,
    transposed,
)
from .scaling import Scaling

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
    same numbers has one copy for both. (On CPU dgrad makes its own operand; that costs only the rounding.) Nothing is
    saved of a quantizer that was asked for one copy, or that keeps values as they are.
    """
    quantizers = scaling.config.quantizers
    if isinstance(weight, QuantizedFields):
        if quantizers is not HIGH_PRECISION:
            check_operands(weight.quantizer, quantizers, needs_dgrad)
            return EncodedTensor(weight_operand(weight, scaling, "rowwise", to.wide))
        weight = weight.dequantize(to.dtype)  # no recipe is in force that it has to fit
    quantizer = scaling.for_weight(records=True)
    if to.on != "quantized":
        return EncodedTensor(quantizer.operand(weight, "rowwise", to.wide))
    value = value_of(quantizer)
    both = value.symmetric or (value.rowwise and value.columnwise)
    if quantizers.backward_override or not needs_dgrad or not both or value.KEEPS_VALUES:
        return EncodedTensor(quantized_operand(quantizer, weight, "rowwise", to.wide))
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
        again = live.operand(weight[None], usage, dtype)
        left = again.scale if again.scale is None or again.scale.dim() < weight.dim() - 1 else again.scale[0]
        return transposed(Operand(again.values[0], left), usage)
    return quantized_operand(live, weight, usage, dtype)


# --- forms of stored weights ---------------------------------------------------------------------------------------

_FORM = (
    "fp8_dtype",
    "block_scaling_dim",
    "force_pow_2_scales",
    "two_dimensional",
    "rowwise_quantizer",
    "columnwise_quantizer",
)
"""The fields of quantizers that a stored number depends on; not those that say which copies there are."""
_FORM_OF_NVFP4 = (*_FORM, "with_2d_quantization")
"""MXFP8 has this name, too: Transformer Engine's of two_dimensional."""
_warned: set[str] = set()


def check_format(stored: Quantizer, quantizer: Quantizer) -> None:
    """Raise ValueError where a weight that is `stored` quantized is not in the format that the recipe in force wants;
    warn once where it is in another form of that format."""
    # where quantizers are no constants, a comparison traced under dynamic=True makes graph inputs of floats
    if stored is quantizer or (not (register_constants is None and compiling()) and equal_values(stored, quantizer)):
        return
    if stored.FORMAT != quantizer.FORMAT:
        raise ValueError(
            f"the weight is stored as {stored.FORMAT}, but the recipe in force wants {quantizer.FORMAT}; "
            "allowed: a recipe of the stored format, or autocast(enabled=False)"
        )
    # under delayed scaling a stored weight's scale always comes from its own amax
    names = ("fp8_dtype",) if quantizer.NEEDS_STATE else _FORM_OF_NVFP4 if stored.FORMAT == "nvfp4" else _FORM
    others = [name for name in names if getattr(stored, name, None) != getattr(quantizer, name, None)]
    if others:
        form = ", ".join([f"{name} {getattr(stored, name)}" for name in others])
        _warn_of_another_form(stored.FORMAT, form)


def check_operands(stored: Quantizer, quantizers: GemmQuantizers, needs_dgrad: bool) -> None:
    """Raise ValueError for a stored weight that a GEMM of this recipe cannot take, as `GemmQuantizers` does for those
    that the recipe makes."""
    refuse_two_dimensional(quantizers.input, stored, "input", "the stored weight", "rowwise", "rowwise")
    if needs_dgrad and quantizers.backward_override is None:
        gradient = quantizers.grad_output
        refuse_two_dimensional(gradient, stored, "grad_output", "the stored weight", "rowwise", "columnwise")
        refuse_transformed(stored, "the stored weight")


@constant_when_traced
def _warn_of_another_form(stored: str, form: str) -> bool:
    """Warn once. It runs while tracing, not in the graph."""
    message = (
        f"a weight stored as {stored} with {form} is in another form than the recipe in force gives weights; GEMMs "
        "read it as it is stored"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)
    return True
