"""`y = x w^T + b` in high precision or under a recipe: the one implementation behind every dense layer.

T rows, K in, N out. Under a recipe the three GEMMs are computed from quantized operands:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

The formula is plain Python around kernels on plain tensors, not one opaque operation per layer, so that the compiler
fuses the quantizations with the norms and activations around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, gemm

from .autocast import current_recipe
from .module import compute_dtype
from .quantized_tensor import QuantizedTensor
from .quantizer import Usage
from .recipe import Recipe


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in the compute dtype, under the recipe in force.

    x: [..., in]; weight: [out, in], plain or quantized; bias: [out] or None.
    """
    dtype = compute_dtype(x)
    x = x.to(dtype)
    recipe = current_recipe()
    if recipe is None:
        weight = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(dtype))
    y = _QuantizedLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, recipe)
    return y.view(*x.shape[:-1], weight.shape[0])


def weight_operand(weight: Tensor, recipe: Recipe, usage: Usage, dtype: torch.dtype) -> Operand:
    """Return a weight as the recipe's operand: a stored one exactly as it is, a high-precision one quantized now.

    Raises ValueError where the stored format is not the recipe's.
    """
    if not isinstance(weight, QuantizedTensor):
        return recipe.weight_quantizer().operand(weight, usage, dtype)
    check_format(weight, recipe)
    return weight.operand(usage, dtype)


def check_format(weight: QuantizedTensor, recipe: Recipe) -> None:
    """Raise ValueError where a stored weight is not in the recipe's weight format."""
    if type(weight.quantizer) is not type(recipe.weight_quantizer()):
        raise ValueError(
            f"the weight is stored as {weight.quantizer.FORMAT}, but the recipe in force is {recipe.NAME!r}; allowed: "
            "a recipe of the stored format, or autocast(enabled=False)"
        )


def _transposed(operand: Operand) -> Operand:
    return Operand(operand.values.t(), operand.scale)


class _QuantizedLinear(torch.autograd.Function):
    """x: [T, K] in the compute dtype; weight: [N, K] plain or quantized; bias: [N] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        ctx.bias_dtype = None if bias is None else bias.dtype
        left = recipe.input_quantizer().operand(x, "rowwise", x.dtype)
        right = weight_operand(weight, recipe, "rowwise", x.dtype)
        return gemm(left, _transposed(right), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe, dtype = ctx.recipe, x.dtype
        quantizer = recipe.grad_output_quantizer()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            right = weight_operand(weight, recipe, "columnwise", dtype)
            dx = gemm(quantizer.operand(dy, "rowwise", dtype), right, dtype)
        if ctx.needs_input_grad[1]:
            right = recipe.input_quantizer().operand(x, "columnwise", dtype)
            dw = gemm(_transposed(quantizer.operand(dy, "columnwise", dtype)), right, weight.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.float().sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None
