"""Cross entropy over a vocabulary that is split: each shard's part of it, on plain tensors, without communication.

T tokens, V columns of a shard, W words of the whole vocabulary. A shard knows the logsumexp of its columns only; the
whole's is the logsumexp over shards, exact to rounding whatever the magnitudes are. So `shard_statistics` of each
shard, moved to all of them, give the loss (`combined_loss`), and with its normalizer each shard has the gradient of its
own logits (`shard_gradient`). Labels are words of the whole vocabulary, -100 where a token does not count; `first` is
the word of a shard's first column. (arXiv 1909.08053, section 3; label smoothing: arXiv 1512.00567, section 7.)

On an accelerator the kernels of the whole vocabulary serve, but for label smoothing. Elsewhere eager float32
temporaries are of a few rows at a time, as in `rows`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..chunks import wide
from ..compiling import compiling
from ..launch import on_accelerator
from . import op, rows
from .reference import IGNORE_INDEX


def shard_labels(labels: Tensor, first: int, columns: int) -> Tensor:
    """Map labels [T] to this shard's columns. -100 stays; labels of other shards become `columns`, one past the last
    column."""
    inside = (labels >= first) & (labels < first + columns)
    return torch.where(labels == IGNORE_INDEX, labels, torch.where(inside, labels - first, columns))


def shard_statistics(logits: Tensor, labels: Tensor, first: int, label_smoothing: float = 0.0) -> Tensor:
    """Return [3, T], or with label smoothing [4, T], float32 (float64 of such logits): the logsumexp of logits [T, V],
    the label's logit or 0, whether the label is here, and the sum of all logits. labels: [T] int64."""
    local = shard_labels(labels, first, logits.shape[1])
    here = (local >= 0) & (local < logits.shape[1])
    column = torch.where(here, local, 0)[:, None]
    dtype = wide(logits)
    target = torch.where(here, logits.gather(1, column)[:, 0].to(dtype), 0.0)
    if on_accelerator(logits) and dtype != torch.float64:
        normalizer = op.cross_entropy_fwd(logits, local)[1]
    else:
        normalizer = torch.cat(
            [torch.logsumexp(logits[step].to(dtype), dim=-1) for step in shard_rows_per_step(logits)]
        )
    found = [normalizer, target, here.to(dtype)]
    return torch.stack([*found, logits.sum(-1, dtype=dtype)] if label_smoothing else found)


def combined_loss(
    statistics: Tensor, labels: Tensor, vocab_size: int, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return each token's loss [T], 0 where it does not count and NaN where no shard has its label, and the logsumexp
    of all its logits [T]. statistics: [shards, 3 or 4, T] of `shard_statistics`; vocab_size: W."""
    normalizer = torch.logsumexp(statistics[:, 0], dim=0)
    target, found = statistics[:, 1].sum(0), statistics[:, 2].sum(0)
    loss = torch.where(found > 0, normalizer - target, torch.nan)
    if label_smoothing:
        mean = statistics[:, 3].sum(0) / vocab_size
        loss = (1 - label_smoothing) * loss + label_smoothing * (normalizer - mean)
    return torch.where(labels == IGNORE_INDEX, 0.0, loss), normalizer


def shard_gradient(
    logits: Tensor,
    labels: Tensor,
    first: int,
    normalizer: Tensor,
    scale: Tensor,
    vocab_size: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the gradient in a shard's logits [T, V], in their dtype, of the sum of scale [T] times the losses.
    normalizer: [T] of `combined_loss`."""
    local = shard_labels(labels, first, logits.shape[1])
    if on_accelerator(logits) and logits.dtype != torch.float64 and not label_smoothing:
        return op.cross_entropy_bwd(logits, local, normalizer, scale)
    counted = torch.where(labels == IGNORE_INDEX, 0.0, scale)[:, None]
    here = (local >= 0) & (local < logits.shape[1])
    column = torch.where(here, local, 0)[:, None]
    of_label = torch.where(here, label_smoothing - 1.0, 0.0).to(normalizer.dtype)[:, None]
    parts = []
    for step in shard_rows_per_step(logits):
        gradient = (logits[step].to(normalizer.dtype) - normalizer[step, None]).exp()
        if label_smoothing:
            gradient = gradient - label_smoothing / vocab_size
        gradient = gradient.scatter_add(1, column[step], of_label[step])
        parts.append((gradient * counted[step]).to(logits.dtype))
    return torch.cat(parts)


def shard_rows_per_step(logits: Tensor) -> Iterable[slice]:
    """Return the rows of logits [T, V] to take at a time: in a graph all, which the compiler fuses."""
    return [slice(None)] if compiling() or not logits.shape[0] else rows.rows_per_step(logits)
