"""Gradient of a table lookup: every row of the table gets the sum of its uses' gradients.

T uses, H channels, V rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embedding_backward(grad: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Return the table's gradient: [T, H], ids [T] int64 -> [num_rows, H] in grad's dtype.

    A row's uses are added in float32 in the order of T and rounded once. Only the rows in use are added up; the others
    cost their zeros.
    """
    used, place = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(used.shape[0], grad.shape[1], dtype=torch.float32, device=grad.device)
    sums.index_add_(0, place, grad.float())
    out = torch.zeros(num_rows, grad.shape[1], dtype=grad.dtype, device=grad.device)
    out[used] = sums.to(grad.dtype)
    return out
