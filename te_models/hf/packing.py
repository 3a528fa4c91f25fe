"""Several texts in one row, as collators that pad nothing make them: told by the positions, as transformers does.

B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling


def same_text(position_ids: Tensor, batch: int) -> Tensor | None:
    """position_ids: [B or 1, S] -> [B, S, S] bool, true where two tokens of a row belong to the same text; None where
    each row is one text. A text ends where the next position is not one more.

    The positions are looked at on the host, but for compiled code, which always gets the mask. Positions of other
    shapes are left to the model, which refuses them.
    """
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch):
        return None
    ends = position_ids.diff(dim=-1) != 1
    if not compiling() and not ends.any():
        return None
    number = torch.nn.functional.pad(ends.long().cumsum(dim=-1), (1, 0))
    return (number[:, :, None] == number[:, None, :]).expand(batch, -1, -1)
