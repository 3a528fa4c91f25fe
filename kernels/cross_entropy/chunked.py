"""Linear cross entropy without logits of all tokens: loss and gradients chunk by chunk, all in the forward.

T tokens, H hidden, V vocabulary, C tokens of a chunk. A chunk's logits [C, V] are overwritten by their gradient, which
two GEMMs turn into the gradients of hidden states and weight before the next chunk begins. The weight's gradient is
added up in float32 where there are several chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.reference import accumulate_product
from . import rows
from .reference import valid_count


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    softcap: Tensor | None,
    chunk_tokens: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean loss (float32 scalar) and the gradients of hidden [T, H], weight [V, H] and bias [V].

    wanted: which of the three gradients; the others come back empty. Arguments as in `linear_cross_entropy`.
    """
    if hidden.device.type == "cuda":
        from .triton import cross_entropy_grad_ as loss_and_gradient_
    else:
        loss_and_gradient_ = rows.loss_and_gradient_
    tokens, count = hidden.shape[0], valid_count(labels)
    scale = torch.ones_like(count) / count if any(wanted) else None
    chunks = [slice(begin, begin + chunk_tokens) for begin in range(0, tokens, chunk_tokens)]
    sum_dtype = weight.dtype if len(chunks) <= 1 else torch.float32
    loss = hidden.new_empty(tokens, dtype=torch.float32)
    d_hidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    d_weight = weight.new_empty(weight.shape if wanted[1] else 0, dtype=sum_dtype)
    if not chunks:
        d_weight.zero_()
    d_bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=torch.float32)
    for chunk in chunks:
        logits = F.linear(hidden[chunk], weight, bias)
        loss[chunk] = loss_and_gradient_(logits, labels[chunk], scale, multiplier, softcap)
        if wanted[0]:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if wanted[1]:
            accumulate_product(d_weight, logits.t(), hidden[chunk], chunk.start > 0, None)
        if wanted[2]:
            d_bias += logits.sum(0, dtype=torch.float32)
    d_bias = d_bias if bias is None else d_bias.to(bias.dtype)
    return loss.sum() / count, d_hidden, d_weight.to(weight.dtype), d_bias
