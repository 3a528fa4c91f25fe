"""Where rows of queries and keys stand in the sequences they belong to.

B batch, S length, T tokens of all sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SequenceRows(NamedTuple):
    """Where queries or keys stand. position, length: [B or 1, S], the number of each row in its sequence and how many
    rows that has; real: [B or 1, S] bool, False for padding, None: none is; sequence: [1, T], the number of the packed
    sequence; None: not packed."""

    position: Tensor
    length: Tensor | int
    real: Tensor | None = None
    sequence: Tensor | None = None

    def places(self, *, from_end: bool) -> Tensor:
        """Return the positions, counted from the first row of a sequence or (negative) from behind its last."""
        return self.position - self.length if from_end else self.position


def whole_rows(length: int, device: torch.device) -> SequenceRows:
    """Return the rows of sequences without padding."""
    return SequenceRows(torch.arange(length, device=device)[None], length)


def rows_not_hidden(hidden: Tensor) -> SequenceRows:
    """Return the rows of sequences of which `hidden` [B, 1, 1, S] bool marks the padding."""
    real = ~hidden[:, 0, 0]
    return SequenceRows(torch.arange(real.shape[1], device=real.device)[None], real.sum(-1, keepdim=True), real)


def padded_rows(length: int, cu_seqlens: Tensor) -> SequenceRows:
    """Return the rows of sequences of which the first ones are real. cu_seqlens: [B + 1], sums of their numbers."""
    position = torch.arange(length, device=cu_seqlens.device)[None]
    lengths = cu_seqlens.diff()[:, None]
    return SequenceRows(position, lengths, position < lengths)


def packed_rows(tokens: int, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> SequenceRows:
    """Return the rows of sequences that follow each other. cu_seqlens: [B + 1], sums of the sequences' lengths;
    cu_seqlens_padded: [B + 1], where each begins, None: where the one before ends."""
    begins = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(token, begins[1:].contiguous(), right=True).clamp(max=cu_seqlens.shape[0] - 2)
    position, length = token - begins[:-1][sequence], cu_seqlens.diff()[sequence]
    return SequenceRows(position[None], length[None], (position < length)[None], sequence[None])
