"""Documents that lie one after another in rows of tokens: where they begin, and which tokens are in one.

B batch, T or S tokens of a row, M documents. documents: [B, T], a number for each token; neighbours of the same number
are a document, and a negative number is padding. cu_seqlens: [M + 1], where documents of the only row begin, and where
the last one ends.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def begins_of(documents: Tensor, *, first: bool = True) -> Tensor:
    """Return where a document begins, bool [B, T]. first: what is said of the first token of a row."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=first)


def starts_of(documents: Tensor | None) -> Tensor | None:
    """Return where a document begins behind another one, bool [B, T]. documents: [B, T] of numbers; None: nowhere."""
    return None if documents is None else begins_of(documents, first=False)


def offsets_of(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return where documents begin, rows one after the other, and where the last one ends, [M + 1] int32; and the
    number of the first document of each row, and of all, [B + 1]. documents: [B, T] numbers. Waits for the device."""
    begins = begins_of(documents)
    place = begins.flatten().nonzero().flatten()
    own = F.pad(begins.sum(1).cumsum(0), (1, 0))
    return F.pad(place, (0, 1), value=documents.numel()).int(), own


def in_one_row(
    documents: Tensor, state: Tensor, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Return tensors [B, T, ...] with their rows one after the other, the states that documents begin with, where
    documents begin, and what makes the results of the rows of a result [1, B T, ...] and the states behind documents.
    documents: [B, T] numbers; state: [B, ...], from which the first document of each row goes on."""
    cu_seqlens, own = offsets_of(documents)
    state = state.new_zeros(len(cu_seqlens) - 1, *state.shape[1:]).index_copy(0, own[:-1], state)

    def of_rows(out: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return out[0].unflatten(0, documents.shape), after[own[1:] - 1]

    return [x.flatten(0, 1)[None] for x in tensors], state, cu_seqlens, of_rows


def documents_of_lengths(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the document numbers, int64 [1, tokens], of sequences whose lengths have the sums cu_seqlens [B + 1];
    -1 behind the last one."""
    place = torch.arange(tokens, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, place.to(cu_seqlens.dtype), right=True) - 1
    return torch.where(place < cu_seqlens[-1], number, -1)[None]


def first_positions(documents: Tensor) -> Tensor:
    """Return where each token's document begins, int64 [B, S]."""
    position = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(begins_of(documents), position, 0).cummax(1).values


def document_runs(documents: Tensor) -> Tensor:
    """Return a number for each document of a row, int64 [B, S], -1 for padding. documents: [B, S], negative for
    padding; neighbours of the same number are a document, so that a number that comes again begins another one."""
    return torch.where(documents >= 0, first_positions(documents), -1)


def sees_own_document(documents: Tensor, queries: Tensor | None = None) -> Tensor:
    """Return where a token may see another, bool [B, Q, S]: in its document. Padding sees nothing, itself neither. The
    mask where `packed_attention` does not serve.

    documents: [B, S], as for `document_runs`. queries: the numbers [B, Q] of the tokens that see, where `documents` has
    been through `document_runs`; None: of all.
    """
    if queries is None:
        documents = queries = document_runs(documents)
    return (queries[:, :, None] == documents[:, None, :]) & (queries >= 0)[:, :, None]
