"""Softmax and its gradient a few rows at a time, for eager PyTorch on CPU: float32 temporaries stay in cache.

T tokens, V vocabulary. Logits here are what the projection made of the hidden states; `multiplier` and `softcap` as in
`output_logits`, but in float32 (float64 of such logits).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..chunks import wide
from .reference import IGNORE_INDEX

# Float32 elements of one step: 4 MiB, so that they stay in cache (measured: 0.5 to 16 MiB alike, 32 MiB 1.4x slower).
_STEP_ELEMENTS = 1 << 20


def rows_per_step(logits: Tensor) -> Iterator[slice]:
    """Rows of logits [T, V] to take at a time."""
    step = max(1, _STEP_ELEMENTS // max(1, logits.shape[1]))
    return (slice(begin, begin + step) for begin in range(0, logits.shape[0], step))


def label_columns(labels: Tensor) -> Tensor:
    """Return labels [T] as columns [T, 1], 0 in place of those to ignore."""
    return torch.where(labels != IGNORE_INDEX, labels, 0)[:, None]


def loss_and_gradient_(
    logits: Tensor, labels: Tensor, scale: Tensor | None, multiplier: Tensor | None, softcap: Tensor | None
) -> Tensor:
    """Return each token's loss [T], float32 (float64 of such logits); overwrite logits [T, V] by their gradient.

    scale: what the gradient of each loss is; None: logits are left alone. multiplier, softcap: None or, as scale,
    scalars in the dtype of the loss. Labels of -100 cost nothing.
    """
    loss = logits.new_empty(logits.shape[0], dtype=wide(logits))
    valid, columns = labels != IGNORE_INDEX, label_columns(labels)
    for rows in rows_per_step(logits):
        z = logits[rows].to(loss.dtype, copy=True)
        if multiplier is not None:
            z.mul_(multiplier)
        if softcap is not None:
            z = z.div_(softcap).tanh_().mul_(softcap)
        normalizer = torch.logsumexp(z, dim=-1, keepdim=True)
        loss[rows] = torch.where(valid[rows], (normalizer - z.gather(1, columns[rows]))[:, 0], 0.0)
        if scale is None:
            continue
        slope = None if softcap is None else 1 - (z / softcap).square_()
        gradient = z.sub_(normalizer).exp_()
        gradient.scatter_add_(1, columns[rows], torch.full_like(columns[rows], -1, dtype=loss.dtype))
        slope_of_logits = scale if multiplier is None else scale * multiplier
        gradient.mul_(torch.where(valid[rows], slope_of_logits, 0.0)[:, None])
        logits[rows] = gradient if slope is None else gradient.mul_(slope)
    return loss
