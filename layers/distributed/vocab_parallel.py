"""Cross entropy of logits whose vocabulary is split over the ranks of a group: one small all-gather, no logits move.

The mathematics is that of `te_models.kernels.cross_entropy.shards`. T tokens, V words of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.cross_entropy import IGNORE_INDEX, combined_loss, shard_gradient, shard_statistics

from ..collectives import all_gather


class VocabShard(NamedTuple):
    """Which part of the vocabulary a rank holds. group: the name of the process group; each rank has as many words,
    in rank order. One rank needs no group."""

    rank: int = 0
    ranks: int = 1
    group: str = ""


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, shard: VocabShard, *, label_smoothing: float = 0.0, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the loss of each token, the same on every rank, float32 in labels' shape; 0 where it does not count.

    logits: [..., V / ranks], this rank's words; labels: [...] integer, words of the whole vocabulary, or ignore_index.
    Differentiable once in the logits: the loss depends on all ranks' logits, and each rank gets the gradient of its own
    as if it had the whole loss. Collective. ValueError for shapes that do not fit and, eagerly on a CPU, for a label
    that is no word; elsewhere its loss is NaN.
    """
    if logits.shape[:-1] != labels.shape:
        allowed = tuple(logits.shape[:-1])
        raise ValueError(f"target has shape {tuple(labels.shape)}; allowed with these logits: {allowed}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; allowed: a number from 0 to 1")
    words = logits.shape[-1] * shard.ranks
    flat = labels.reshape(-1).to(torch.int64)
    flat = torch.where(flat == ignore_index, IGNORE_INDEX, flat)
    if not compiling() and flat.device.type == "cpu":
        _check_words(flat, words, ignore_index)
    loss = _VocabParallelLoss.apply(logits.reshape(-1, logits.shape[-1]), flat, shard, words, label_smoothing)
    return loss.view(labels.shape)


def _check_words(labels: Tensor, words: int, ignore_index: int) -> None:
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= words))]
    if wrong.numel():
        raise ValueError(f"target has {wrong[0].item()}; allowed: 0 to {words - 1}, or ignore_idx, {ignore_index}")


class _VocabParallelLoss(torch.autograd.Function):
    """Losses [T] of logits [T, V / ranks] and labels [T]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard, words: int, smoothing: float) -> Tensor:
        first = shard.rank * logits.shape[1]
        statistics = shard_statistics(logits, labels, first, smoothing)
        count = statistics.shape[0]
        if shard.ranks > 1:
            statistics = all_gather(statistics, shard.group)
        loss, normalizer = combined_loss(statistics.view(shard.ranks, count, -1), labels, words, smoothing)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.first, ctx.words, ctx.smoothing = first, words, smoothing
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels, normalizer = ctx.saved_tensors
        dx = shard_gradient(logits, labels, ctx.first, normalizer, grads[0], ctx.words, ctx.smoothing)
        return dx, None, None, None, None
