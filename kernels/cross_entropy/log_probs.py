"""Log-probabilities of labels from hidden states and the output weight: logits exist of some tokens and words.

T tokens, H hidden, V words. Both passes go over the vocabulary by `CHUNK_WORDS` for each `chunk_tokens` tokens: the
forward pass keeps one logsumexp per token, and the backward pass computes each block of logits again. What is computed
is `log_softmax(output_logits(hidden, weight, bias).float())` at the labels. A shard of the vocabulary has the words
from `first` on, and its part of the statistics (`shards.combined_loss` joins them).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..custom_op import Output, absent, like, operation
from ..gemm.dense import linear, multiply
from .chunked import add_product
from .reference import IGNORE_INDEX
from .shards import shard_labels

CHUNK_TOKENS, CHUNK_WORDS = 1024, 32_768
"""Tokens and words of the logits that exist at a time, by default: 128 MiB in float32."""


def _statistics(hidden: Tensor) -> Output:
    return like(hidden, (3, hidden.shape[0]), torch.promote_types(hidden.dtype, torch.float32))


@operation("label_statistics", _statistics)
def label_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    multiplier: Tensor | None,
    softcap: Tensor | None,
    first: int,
    chunk_tokens: int,
) -> Tensor:
    """Return [3, T], float32 (float64 of such hidden states): the logsumexp of this shard's logits, the label's logit
    or 0, and whether the label is here.

    hidden: [T, H]; weight: [V, H]; bias: [V]; labels: [T] int64, words of the whole vocabulary, -100 for none.
    multiplier, softcap: float32 scalars, applied in float32.
    """
    words, dtype = weight.shape[0], torch.promote_types(hidden.dtype, torch.float32)
    found = hidden.new_empty((3, hidden.shape[0]), dtype=dtype)
    for rows in spans(hidden.shape[0], chunk_tokens):
        local = shard_labels(labels[rows], first, words)
        normalizer = hidden.new_full((local.shape[0],), -torch.inf, dtype=dtype)
        target = torch.zeros_like(normalizer)
        for columns in spans(words, CHUNK_WORDS):
            z, _ = block_of_logits(hidden[rows], weight[columns], bias, columns, multiplier, softcap)
            column, here = _within(local, columns, z.shape[1])
            normalizer = torch.logaddexp(normalizer, torch.logsumexp(z, -1))
            target = target + torch.where(here, z.gather(1, column)[:, 0], 0.0)
        found[0, rows], found[1, rows] = normalizer, target
        found[2, rows] = ((local >= 0) & (local < words)).to(dtype)
    return found


def _gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> tuple[Output, ...]:
    bias_dtype = torch.float32 if bias is None else bias.dtype
    return (
        like(hidden) if wanted[0] else absent(hidden),
        like(weight) if wanted[1] else absent(weight),
        like(weight, weight.shape[:1], bias_dtype) if wanted[2] else absent(weight, bias_dtype),
    )


@operation("label_log_prob_gradients", _gradients)
def label_log_prob_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalizer: Tensor,
    grad: Tensor,
    multiplier: Tensor | None,
    softcap: Tensor | None,
    first: int,
    chunk_tokens: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in hidden, weight and bias that are `wanted` (the others empty) of the sum of grad [T] times
    the log-probabilities. normalizer: [T], the logsumexp of all words' logits; other arguments as for
    `label_statistics`."""
    words = weight.shape[0]
    single = words <= CHUNK_WORDS
    d_hidden = hidden.new_zeros(hidden.shape if wanted[0] else 0, dtype=hidden.dtype if single else normalizer.dtype)
    d_weight = weight.new_zeros(weight.shape if wanted[1] else 0, dtype=normalizer.dtype)
    d_bias = weight.new_zeros(words if wanted[2] else 0, dtype=normalizer.dtype)
    counted = torch.where(labels == IGNORE_INDEX, 0.0, grad)[:, None]
    for rows in spans(hidden.shape[0], chunk_tokens):
        x, local = hidden[rows], shard_labels(labels[rows], first, words)
        for columns in spans(words, CHUNK_WORDS):
            z, slope = block_of_logits(x, weight[columns], bias, columns, multiplier, softcap)
            column, here = _within(local, columns, z.shape[1])
            gradient = (z - normalizer[rows, None]).exp_().neg_()
            gradient.scatter_add_(1, column, here.to(gradient.dtype)[:, None])
            gradient = (gradient if slope is None else gradient * slope).mul_(counted[rows])
            gradient = gradient if multiplier is None else gradient * multiplier
            if wanted[2]:
                d_bias[columns] += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if wanted[0]:
                product = multiply(gradient, weight[columns])
                d_hidden[rows] = product if single else d_hidden[rows] + product
            if wanted[1]:
                add_product(d_weight[columns], gradient.t(), x, rows.start > 0, None)
    d_bias = d_bias if bias is None else d_bias.to(bias.dtype)
    return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), d_bias


def spans(total: int, size: int) -> Iterator[slice]:
    """Yield the blocks of `size` in `total`."""
    return (slice(begin, min(begin + size, total)) for begin in range(0, total, size))


def _within(local: Tensor, columns: slice, width: int) -> tuple[Tensor, Tensor]:
    """Return (the column [T, 1] of each label in a block of columns, 0 for one outside; whether it is inside [T])."""
    here = (local >= columns.start) & (local < columns.start + width)
    return torch.where(here, local - columns.start, 0)[:, None], here


def block_of_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: slice,
    multiplier: Tensor | None,
    softcap: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return (the logits [T, v] of a block of words, at least float32; the slope of the soft cap, None without)."""
    z = linear(x, weight, None if bias is None else bias[columns])
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if multiplier is not None:
        z = z * multiplier
    if softcap is None:
        return z, None
    tanh = torch.tanh(z / softcap)
    return tanh * softcap, 1 - tanh.square()
