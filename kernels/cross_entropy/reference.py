"""Cross entropy with a softmax in float32 (in float64 of such logits), averaged over the valid tokens.

B batch, S sequence, T tokens, H hidden, V vocabulary. A label of -100 marks a token that does not count.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..chunks import wide
from ..gemm.accumulate import linear_accumulating
from ..gemm.dense import linear

IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Align labels with the positions that predict them: [B, S] -> [B, S], position s gets label s+1, the last none."""
    # padded first: the compiler would have to tell a sequence of S - 1 = 1 apart
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


def output_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return `cap(multiplier * (hidden weight^T + bias))` with `cap(z) = softcap * tanh(z / softcap)` (Gemma 2).

    hidden: [..., H]; weight: [V, H]; bias: [V]. Returns [..., V] in hidden's dtype. main_grad: where the gradient of
    weight is added, in place of giving it to autograd.
    """
    if main_grad is None:
        logits = linear(hidden, weight, bias)
    else:
        logits = linear_accumulating(hidden, weight, bias, main_grad)
    # Under dynamic=True a float is a variable of the graph; to ask for its value would compile everything twice.
    if not statically_known_true(multiplier == 1.0):
        logits = logits * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def valid_count(labels: Tensor) -> Tensor:
    """Return the number of labels that count, at least 1, as a float32 scalar."""
    return (labels != IGNORE_INDEX).sum().clamp(min=1).float()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """As the public function: the mean over valid tokens of `logsumexp(logits) - logits[label]`."""
    total = F.cross_entropy(logits.to(wide(logits)), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / valid_count(labels)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return `cross_entropy(output_logits(hidden, weight, bias), labels)`. hidden: [T, H]; labels: [T]."""
    scaled = {"multiplier": multiplier, "softcap": softcap, "main_grad": main_grad}
    return cross_entropy(output_logits(hidden, weight, bias, **scaled), labels)
