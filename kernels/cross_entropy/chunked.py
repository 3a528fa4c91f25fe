"""Linear cross entropy without logits of all tokens: loss and gradients chunk by chunk, all in the forward.

T tokens, H hidden, V vocabulary, C tokens of a chunk. A chunk's logits [C, V] are overwritten by their gradient. Two
GEMMs turn it into the gradients of hidden states and weight before the next chunk begins. The weight's gradient is
added up in float32 where there are several chunks; a CPU whose GEMMs are 16-bit rounds the product of each chunk to the
weight's dtype before, in which the gradient is returned in any case.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backend import definitions_only
from ..chunks import wide
from ..compiling import compiling
from ..gemm.cpu import operand_dtype
from ..gemm.dense import linear, multiply_dense
from ..gemm.reference import accumulate_product
from . import rows
from .reference import valid_count

LossAndGradient = Callable[[Tensor, Tensor, Tensor | None, Any, Any], Tensor]
_ROWS = 128  # of the weight's gradient, whose product then stays in the cache


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    softcap: Tensor | None,
    chunk_tokens: int,
    wanted: list[bool],
    weight_grad_in_fp32: bool,
    loss_and_gradient_: LossAndGradient | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean loss, a scalar in `wide`, and the gradients of hidden [T, H], weight [V, H] and bias [V].

    wanted: which of the three gradients; the others come back empty. weight_grad_in_fp32: the weight's in float32, no
    product of which is rounded. loss_and_gradient_: in place of `rows.loss_and_gradient_`, for logits of a part of the
    vocabulary. Other arguments as in `linear_cross_entropy`.
    """
    if (
        loss_and_gradient_ is None
        and hidden.device.type == "cuda"
        and hidden.dtype != torch.float64
        and not definitions_only()
    ):
        from .triton import cross_entropy_grad_ as loss_and_gradient_
    elif loss_and_gradient_ is None:
        loss_and_gradient_ = rows.loss_and_gradient_
    tokens, count = hidden.shape[0], valid_count(labels)
    dtype = wide(hidden)
    scale = torch.ones_like(count, dtype=dtype) / count if any(wanted) else None
    chunks = [slice(begin, begin + chunk_tokens) for begin in range(0, tokens, chunk_tokens)]
    sum_dtype = torch.promote_types(weight.dtype, torch.float32)
    sum_dtype = sum_dtype if weight_grad_in_fp32 or len(chunks) > 1 else weight.dtype
    loss = hidden.new_empty(tokens, dtype=dtype)
    d_hidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    d_weight = weight.new_empty(weight.shape if wanted[1] else 0, dtype=sum_dtype)
    if not chunks:
        d_weight.zero_()
    d_bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=dtype)
    for chunk in chunks:
        logits = linear(hidden[chunk], weight, bias)
        loss[chunk] = loss_and_gradient_(logits, labels[chunk], scale, multiplier, softcap)
        if wanted[0]:
            d_hidden[chunk] = multiply_dense(logits, weight)
        if wanted[1]:
            in_fp32 = weight_grad_in_fp32 or operand_dtype(logits.device, logits.dtype) != logits.dtype
            add = accumulate_product if in_fp32 else add_product
            add(d_weight, logits.t(), hidden[chunk], chunk.start > 0, None)
        if wanted[2]:
            d_bias += logits.sum(0, dtype=dtype)
    d_bias = d_bias if bias is None else d_bias.to(bias.dtype)
    d_weight = d_weight if weight_grad_in_fp32 else d_weight.to(weight.dtype)
    return loss.sum() / count, d_hidden, d_weight, d_bias


def add_product(d_weight: Tensor, left: Tensor, right: Tensor, accumulate: bool, scale: None) -> None:
    """Add `left @ right`, [V, C] x [C, H], to d_weight, or write it there."""
    if compiling():
        product = multiply_dense(left, right)
        _ = d_weight.add_(product) if accumulate else d_weight.copy_(product)
    elif d_weight.device.type != "cpu":
        accumulate_product(d_weight, left, right, accumulate, None)
    elif d_weight.dtype == left.dtype:
        torch.addmm(d_weight, left, right, beta=float(accumulate), out=d_weight)  # beta 0 ignores what it holds
    else:
        buffer = left.new_empty(min(_ROWS, d_weight.shape[0]), d_weight.shape[1])
        for begin in range(0, d_weight.shape[0], _ROWS):
            target = d_weight[begin : begin + _ROWS]
            product = torch.mm(left[begin : begin + _ROWS], right, out=buffer[: target.shape[0]])
            _ = target.add_(product) if accumulate else target.copy_(product)
