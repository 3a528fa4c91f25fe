"""Rows of tokens in chunks, for rules that carry a state from token to token, and where documents begin in them.

B batch, T tokens, H heads, D channels, N chunks, C tokens of a chunk, M documents.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk: within it, products of all pairs of tokens; from one to the next, a state."""


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which rules, norms and losses compute: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def finite_decay(g: Tensor) -> Tensor:
    """Return the logarithm of a decay, at least -104, whose exponential is 0 in float32 and 1e-45 in float64: of sums
    with minus infinity, differences would be NaN."""
    return g.clamp(min=-104.0)


def chunks_of(x: Tensor, size: int = CHUNK) -> Tensor:
    """Return x [B, T, H, D] as [N, B, H, C, D], and [B, T, H] as [N, B, H, C], zeros behind the last token."""
    batch, tokens, heads, *channels = x.shape
    chunks = (tokens + size - 1) // size
    # this many tokens in all; the compiler sees that they fill whole chunks
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, chunks * size - tokens))
    return x.view(batch, chunks, size, heads, *channels).permute(1, 0, 3, 2, *range(4, x.dim() + 1))


def join_chunks(x: Tensor, tokens: int) -> Tensor:
    """Return [N, B, H, C, D] as [B, T, H, D]."""
    chunks, batch, heads, size, channels = x.shape
    return x.permute(1, 0, 3, 2, 4).reshape(batch, chunks * size, heads, channels)[:, :tokens]


class Marks(NamedTuple):
    """What tokens of a chunk reach, by documents; bool. sees: [N, B, 1, C, C] or [C, C], whether a token sees another
    one, itself included. enters: [N, B, 1, C], whether the state before the chunk reaches a token; leaves: whether a
    token reaches the state behind it; passes: [N, B, 1], whether the state before the chunk does. None: all."""

    sees: Tensor
    enters: Tensor | None = None
    leaves: Tensor | None = None
    passes: Tensor | None = None


def marks_of(starts: Tensor | None, device: torch.device) -> Marks:
    """Return the marks of rows. starts: [B, T] bool, where a document begins with a state of zeros; None: nowhere."""
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril()
    if starts is None:
        return Marks(causal)
    number = chunks_of(starts.long()[:, :, None]).cumsum(-1)
    last = number[..., -1:]
    return Marks(
        causal & (number[..., :, None] == number[..., None, :]), number == 0, number == last, last[..., 0] == 0
    )


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x, zeros where mask is false; None: x."""
    return x if mask is None else torch.where(mask, x, 0)


class Aligned(NamedTuple):
    """Documents laid out so that each begins a chunk; the state behind its last chunk is then the state behind the
    document. A document may begin with `lead` additional tokens that write its initial state.

    place: [T], where each token is; lead_place: [M, lead]; first, last: [M], the first token and the last chunk of
    each document; length: tokens of the new layout, the same for all documents of a total length.
    """

    place: Tensor
    lead_place: Tensor
    first: Tensor
    last: Tensor
    length: int

    def scattered(self, x: Tensor, lead: Tensor | None = None) -> Tensor:
        """Return x [1, T, ...] in the new layout, zeros elsewhere. lead: [M, lead, ...], before the documents."""
        y = x.new_zeros(1, self.length, *x.shape[2:]).index_copy(1, self.place, x)
        if lead is None:
            return y
        return y.index_copy(1, self.lead_place.flatten(), lead.to(x.dtype).flatten(0, 1)[None])

    def starts(self) -> Tensor:
        """Return where documents begin, bool [1, length]."""
        none = torch.zeros(1, self.length, dtype=torch.bool, device=self.place.device)
        return none.index_fill(1, self.first, True)


def aligned_documents(cu_seqlens: Tensor, tokens: int, lead: int = 0, size: int = CHUNK) -> Aligned:
    """Return the layout of documents. cu_seqlens: [M + 1] int, where they begin, and where the last one ends."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    chunks = ((end - begin + lead + size - 1) // size).clamp(min=1)
    after = chunks.cumsum(0)
    first = (after - chunks) * size
    token = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(end, token, right=True).clamp(max=end.shape[0] - 1)
    place = first[document] + lead + token - begin[document]
    lead_place = first[:, None] + torch.arange(lead, device=cu_seqlens.device)
    most = (tokens + size - 1) // size + end.shape[0] * (1 + (lead + size - 1) // size)
    return Aligned(place, lead_place, first, after - 1, most * size)


def of_documents(
    rule: Callable[..., tuple[Tensor, Tensor]],
    operands: Sequence[Tensor],
    leads: Sequence[Tensor] | None,
    cu_seqlens: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what a rule gives of documents [1, T, ...], each from the beginning of a chunk on, and the states behind
    each of them.

    rule: called with the operands, in `dtype`, and where documents begin; returns out and the states behind chunks.
    leads: of each operand tokens [M, lead, ...] that write the initial states; None: these are zeros.
    """
    layout = aligned_documents(cu_seqlens, operands[0].shape[1], 0 if leads is None else leads[0].shape[1])
    pairs = zip(operands, leads or [None] * len(operands), strict=True)
    out, states = rule(*(layout.scattered(x.to(dtype), lead) for x, lead in pairs), layout.starts())
    return out[:, layout.place], states[layout.last, 0]


def writers_of(initial_state: Tensor, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k and v of tokens that write a state [M, H, K, V] where nothing decays: queries of zeros, unit vectors
    as keys, and the rows of the state."""
    documents, K = initial_state.shape[0], initial_state.shape[2]
    unit = torch.eye(K, dtype=dtype, device=initial_state.device)[None, :, None].expand(documents, K, key_heads, K)
    return [torch.zeros_like(unit), unit, initial_state.to(dtype).transpose(1, 2)]


def check_cu_seqlens(
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
    batch: int,
    initial_state: Tensor | None,
    shape: tuple[int, ...],
) -> None:
    """Raise ValueError where rows, documents and initial states do not fit, and for both ways to say where documents
    are. shape: of one initial state."""
    rows = batch
    if cu_seqlens is not None:
        if batch != 1 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens has shape {list(cu_seqlens.shape)} with {batch} rows; allowed: 2 numbers or more, 1 row"
            )
        rows = cu_seqlens.shape[0] - 1
    if initial_state is not None and tuple(initial_state.shape) != (rows, *shape):
        raise ValueError(f"initial_state has shape {list(initial_state.shape)}; allowed: {[rows, *shape]}")
    if cu_seqlens is not None and documents is not None:
        raise ValueError("cu_seqlens and documents are both given; allowed: one of them")
