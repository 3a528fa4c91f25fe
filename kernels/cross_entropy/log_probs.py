"""Log-probabilities of labels from hidden states and the output weight: logits exist of some tokens and words.

T tokens, H hidden, V words. Both passes go over the vocabulary by `CHUNK_WORDS` for each `chunk_tokens` tokens: the
forward pass keeps one logsumexp per token, and the backward pass computes each block of logits again. What is computed
is `log_softmax(output_logits(hidden, weight, bias).float())` at the labels. A shard of the vocabulary has the words
from `first` on, and its part of the statistics (`shards.combined_loss` joins them).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..chunks import wide
from ..custom_op import Output, like, operation
from ..gemm.dense import linear, multiply_dense
from .chunked import add_product
from .op import output_gradients
from .reference import IGNORE_INDEX
from .shards import shard_labels

CHUNK_TOKENS, CHUNK_WORDS = 1024, 32_768
"""Tokens and words of the logits that exist at a time, by default: 128 MiB in float32."""


def _statistics(hidden: Tensor) -> Output:
    return like(hidden, (3, hidden.shape[0]), wide(hidden))


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
    multiplier, softcap: scalars in `wide`.
    """
    words, dtype = weight.shape[0], wide(hidden)
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


def gradient_outputs(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> tuple[Output, ...]:
    """Describe the gradients in hidden, weight and bias of a backward pass by blocks."""
    return output_gradients(hidden, weight, bias, wanted)


class BlockGradients:
    """The gradients in hidden [T, H], weight [V, H] and bias [V] that are `wanted`, added up by blocks of logits; the
    others are empty. dtype: of the sums of several blocks."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], dtype: torch.dtype
    ) -> None:
        self._like, self._wanted = (hidden, weight, bias), wanted
        self._single = weight.shape[0] <= CHUNK_WORDS  # all words are in a block
        sums = hidden.dtype if self._single else dtype
        self._hidden = hidden.new_zeros(hidden.shape if wanted[0] else 0, dtype=sums)
        self._weight = weight.new_zeros(weight.shape if wanted[1] else 0, dtype=dtype)
        self._bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=dtype)

    def add(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add what the gradient of a block of logits, [t, v], comes to."""
        hidden, weight, _ = self._like
        if self._wanted[2]:
            self._bias[columns] += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if self._wanted[0]:
            product = multiply_dense(gradient, weight[columns])
            self._hidden[rows] = product if self._single else self._hidden[rows] + product
        if self._wanted[1]:
            add_product(self._weight[columns], gradient.t(), hidden[rows], rows.start > 0, None)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients in the dtypes of what they are of."""
        hidden, weight, bias = self._like
        own = self._bias if bias is None else self._bias.to(bias.dtype)
        return self._hidden.to(hidden.dtype), self._weight.to(weight.dtype), own


@operation("label_log_prob_gradients", gradient_outputs)
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
    found = BlockGradients(hidden, weight, bias, wanted, normalizer.dtype)
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
            found.add(rows, columns, gradient)
    return found.results()


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
    z = z.to(wide(z))
    if multiplier is not None:
        z = z * multiplier
    if softcap is None:
        return z, None
    tanh = torch.tanh(z / softcap)
    return tanh * softcap, 1 - tanh.square()
