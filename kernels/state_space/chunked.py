"""State spaces in chunks: the scan of Mamba-2 as linear attention with decay (arXiv 2405.21060, section 6), whose
queries, keys and values are C, B and dt x; the selective scan by steps that all chunks take at once.

B batch, T tokens, H heads of P channels, D channels, N states, L chunks, M documents.
"""

import torch
from torch import Tensor

from ..chunks import aligned_documents, chunks_of, join_chunks, wide
from ..documents import starts_of
from ..linear_attention import linear_attention
from ..linear_attention.states import decayed_states

STEPS = 16
"""Tokens of a chunk of the selective scan; a graph writes them out."""


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As the public function."""
    dtype = wide(x)
    value, dt = x.to(dtype), dt.to(dtype)
    y, state = linear_attention(
        C,
        B,
        dt[..., None] * value,
        dt * A.to(dtype),
        initial_state=None if initial_state is None else initial_state.mT,
        cu_seqlens=cu_seqlens,
        documents=documents,
    )
    y = y if D is None else y + D.to(dtype)[:, None] * value
    return y.to(x.dtype), state.mT


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As the public function."""
    dtype, tokens, N = wide(x), x.shape[1], A.shape[1]
    value, dt, A, B, C = (z.to(dtype) for z in (x, dt, A, B, C))
    written, starts, layout = dt * value, starts_of(documents), None
    if cu_seqlens is not None:
        layout = aligned_documents(cu_seqlens, tokens, 0 if initial_state is None else N, STEPS)
        unit = state = None
        if initial_state is not None:  # N tokens with the unit vectors as B write it, and do not decay
            state = initial_state.transpose(1, 2)
            unit = torch.eye(N, dtype=dtype, device=x.device).expand(len(state), N, N)
        written, B = layout.scattered(written, state), layout.scattered(B, unit)
        dt, C, starts, initial_state = layout.scattered(dt), layout.scattered(C), layout.starts(), None
    y, states = _scan(written, dt, A, B, C, initial_state, starts)
    y, state = (y[:, :tokens], states[-1]) if layout is None else (y[:, layout.place], states[layout.last, 0])
    return (y if D is None else y + D.to(dtype) * value).to(x.dtype), state


def _scan(
    written: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return S C [B, T, D] and the states behind the chunks [L, B, D, N], of S = exp(dt A) S + written B^T.

    Chunks are short, and each token's step is written out: first from a state of zeros, for what the chunk adds, and
    again from the state before it.
    """
    dt, new, B, C = (chunks_of(z[:, :, None], STEPS)[:, :, 0] for z in (dt, written, B, C))  # [L, B, STEPS, ...]
    decays = [(dt[:, :, t, :, None] * A).exp() for t in range(STEPS)]
    if starts is not None:
        from_zero = chunks_of(starts[:, :, None], STEPS)[:, :, 0, :, None, None]
        decays = [torch.where(from_zero[:, :, t], 0, decay) for t, decay in enumerate(decays)]
    inputs = [new[:, :, t, :, None] * B[:, :, t, None] for t in range(STEPS)]
    added, passed = inputs[0], decays[0]
    for decay, its in zip(decays[1:], inputs[1:], strict=True):
        added, passed = decay * added + its, decay * passed
    if initial_state is None:
        initial_state = written.new_zeros(written.shape[0], *A.shape)
    initial_state = initial_state.to(written.dtype)
    states = decayed_states(added, passed, initial_state)
    state, y = torch.cat([initial_state[None], states[:-1]]), []
    for t in range(STEPS):
        state = decays[t] * state + inputs[t]
        y.append((state * C[:, :, t, None]).sum(-1))
    return join_chunks(torch.stack(y, 2)[:, :, None], len(states) * STEPS)[:, :, 0], states
