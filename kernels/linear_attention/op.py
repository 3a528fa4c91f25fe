"""Public linear attention: on CUDA the kernels of `fla-core` where they are installed, else the chunked form.

B batch, T tokens, Hk heads of q and k, H heads of v, K and V channels, M documents.
"""

from torch import Tensor

from .. import recurrent
from ..chunks import check_cu_seqlens, of_documents, wide, writers_of
from ..documents import starts_of
from . import chunked, reference


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what queries read of a state that sums k v^T up and forgets by exp(g).

    q, k: [B, T, Hk, K], a head serves H / Hk consecutive heads of v: [B, T, H, V]. g: log of the decay, 0 or less, [B,
    T, H]. scale: of q. initial_state: [B, H, K, V]; None: zeros. cu_seqlens: [M + 1] int, where documents of the only
    row begin, and where the last one ends: states are then [M, H, K, V]. documents: [B, T] int, in whose place
    neighbours with the same number are a document; the first goes on from initial_state, the others from zeros.

    Returns out [B, T, H, V] in v's dtype and the states behind the last token, or behind each document of cu_seqlens,
    in float32 (float64 for float64), the dtype of the sums. Raises ValueError for shapes that do not fit, and for
    both cu_seqlens and documents.
    """
    fits = v.dim() == 4 and k.dim() == 4 and q.shape == k.shape and k.shape[:2] == v.shape[:2] == g.shape[:2]
    if not fits or g.shape != v.shape[:3] or k.shape[2] == 0 or v.shape[2] % k.shape[2]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(("q", "k", "v", "g"), (q, k, v, g)))
        raise ValueError(
            f"linear attention has {shapes}; allowed: q and k [B, T, Hk, K], v [B, T, H, V] with H a multiple of Hk, "
            "g [B, T, H]"
        )
    check_cu_seqlens(cu_seqlens, documents, v.shape[0], initial_state, (v.shape[2], k.shape[3], v.shape[3]))
    if v.shape[1] == 0 or (v.shape[1] == 1 and cu_seqlens is None):
        if recurrent.step.uses_recurrent_step(v.shape[3], v, q, k, g, initial_state):
            return recurrent.step.delta_step(q, k, v, g, None, scale, initial_state)
        return reference.linear_attention(q, k, v, g, scale, initial_state)
    if recurrent.uses_recurrence(q, k, v, decay=g):
        return recurrent.run_recurrence(q, k, v, g, None, scale, initial_state, starts_of(documents), cu_seqlens)
    if cu_seqlens is None:
        out, states = chunked.linear_attention(q, k, v, g, scale, initial_state, starts_of(documents))
        return out.to(v.dtype), states[-1]
    leads = None
    if initial_state is not None:
        leads = writers_of(initial_state, k.shape[2], wide(v))
        leads.append(leads[2].new_zeros(leads[2].shape[:3]))

    def rule(*parts: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, starts = parts
        return chunked.linear_attention(q, k, v, g, scale, None, starts)

    out, states = of_documents(rule, (q, k, v, g), leads, cu_seqlens, wide(v))
    return out.to(v.dtype), states
