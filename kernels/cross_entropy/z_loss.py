"""The cross entropy together with the z-loss that keeps the logsumexp of the logits near 0 (PaLM, arXiv 2204.02311,
section 5).

Plain differentiable operations: the compiler fuses them as it fuses the cross entropy alone, and eagerly float32 logits
exist, of a chunk where tokens are computed in chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..chunks import wide
from .reference import IGNORE_INDEX, output_logits, valid_count


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [2], in `wide`: the sums of the cross entropy and of logsumexp(logits)^2 of tokens that count."""
    logits = logits.to(wide(logits))
    total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    normalizer = torch.where(labels != IGNORE_INDEX, torch.logsumexp(logits, dim=-1), 0.0)
    return torch.stack([total, normalizer.square().sum()])


def cross_entropy_and_z_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the mean cross entropy, the mean of logsumexp(logits)^2) over the tokens that count, scalars of
    float32 (float64 of such logits).

    logits: [T, V]; labels: [T] int64, -100 where a token does not count. 0 if none does.
    """
    total, squares = (_sums(logits, labels) / valid_count(labels)).unbind()
    return total, squares


def linear_cross_entropy_and_z_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy_and_z_loss` of the output layer's logits; arguments as for `linear_cross_entropy`.

    chunk_tokens: hold the logits of this many tokens at a time, and compute them once more in the backward pass.
    """

    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        options = {"multiplier": multiplier, "softcap": softcap, "main_grad": main_grad}
        return _sums(output_logits(hidden, weight, bias, **options), labels)

    if chunk_tokens is None:
        sums = of_chunk(hidden, labels)
    else:
        sums = torch.zeros(2, dtype=wide(hidden), device=hidden.device)
        for h, own in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            sums = sums + checkpoint(of_chunk, h, own, use_reentrant=False, preserve_rng_state=False)
    total, squares = (sums / valid_count(labels)).unbind()
    return total, squares
