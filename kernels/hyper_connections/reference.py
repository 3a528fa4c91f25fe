"""The definition of manifold-constrained hyper-connections. Numbers of the mixing are float32 whatever the lanes are.

... batch and sequence, M lanes, H hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mixing(NamedTuple):
    """read: [..., M], what a sublayer reads of each lane; write: [..., M], how much of its result each lane gets;
    carry: [..., M, M], how much of lane i (rows) goes on in lane j (columns)."""

    read: Tensor
    write: Tensor
    carry: Tensor


def _logits(lanes: Tensor, weight: Tensor, norm_eps: float) -> Tensor:
    flat = lanes.flatten(-2).to(torch.promote_types(lanes.dtype, torch.float32))
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return flat @ weight.to(flat.dtype).T


def read_weights(lanes: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, *, eps: float, norm_eps: float) -> Tensor:
    """Return the weights [..., M] by which lanes [..., M, H] become one. weight: [M, M H]; bias: [M]; scale: [1]."""
    logits = _logits(lanes, weight, norm_eps)
    return torch.sigmoid(logits * scale.to(logits.dtype) + bias.to(logits.dtype)) + eps


def mixing_of(
    lanes: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> Mixing:
    """Return how a sublayer reads and writes lanes [..., M, H]. weight: [M (2 + M), M H] and bias [M (2 + M)], their
    rows for read, write and carry (row by row) in turn; scale: [3]; iterations: of `doubly_stochastic`."""
    m, logits = lanes.shape[-2], _logits(lanes, weight, norm_eps)
    factors = torch.cat([s.expand(n) for s, n in zip(scale.to(logits.dtype).unbind(), (m, m, m * m))])
    read, write, carry = (logits * factors + bias.to(logits.dtype)).split([m, m, m * m], -1)
    matrix = torch.softmax(carry.unflatten(-1, (m, m)), -1) + eps
    return Mixing(read.sigmoid() + eps, 2 * write.sigmoid(), doubly_stochastic(matrix, iterations, eps))


def doubly_stochastic(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Divide by the sums of columns, then of rows and of columns in turn, so that they become 1 (Sinkhorn-Knopp)."""
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def collapsed(lanes: Tensor, read: Tensor) -> Tensor:
    """Return what a sublayer reads, [..., H] in the dtype of lanes [..., M, H]."""
    return (read[..., None] * lanes).sum(-2).to(lanes.dtype)


def add_to_lanes(lanes: Tensor, y: Tensor, mixing: Mixing) -> Tensor:
    """Return the lanes behind a sublayer whose result is y [..., H]."""
    return mixing.write.to(y.dtype)[..., None] * y[..., None, :] + mixing.carry.to(y.dtype).mT @ lanes
