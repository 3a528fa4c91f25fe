"""Public gated delta rule: on CUDA the kernels of `fla-core` where they are installed, else the chunked form.

B batch, T tokens, Hk heads of q and k, H heads of v, K and V channels, M documents.
"""

import torch
from torch import Tensor

from .. import recurrent
from ..chunks import check_cu_seqlens, of_documents, wide, writers_of
from ..documents import starts_of
from . import chunked, library, reference


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what queries read of a state that keys write, forgetting by exp(g), correcting by beta (arXiv 2412.06464).

    q, k: [B, T, Hk, K], a head serves H / Hk consecutive heads of v: [B, T, H, V]. g: log of the decay, 0 or less, [B,
    T, H], or [B, T, H, K] for one of each channel (arXiv 2510.26692). beta: [B, T, H]. scale: of q; None: K^-1/2.
    initial_state: [B, H, K, V]; None: zeros. cu_seqlens: [M + 1] int, where documents of the only row begin, and where
    the last one ends: states are then [M, H, K, V]. documents: [B, T] int, in whose place neighbours with the same
    number are a document; the first goes on from initial_state, the others from zeros.

    Returns out [B, T, H, V] in v's dtype and the states behind the last token, or behind each document of cu_seqlens,
    in float32 (float64 for float64), the dtype of the sums. Differentiable once in all tensors. Raises ValueError
    for shapes that do not fit, and for both cu_seqlens and documents.
    """
    _check(q, k, v, g, beta)
    check_cu_seqlens(cu_seqlens, documents, v.shape[0], initial_state, (*v.shape[2:3], k.shape[3], v.shape[3]))
    factor: float = k.shape[3] ** -0.5 if scale is None else scale
    if v.shape[1] == 0 or (v.shape[1] == 1 and cu_seqlens is None):
        if recurrent.step.uses_recurrent_step(v.shape[3], v, q, k, g, beta, initial_state):
            return recurrent.step.delta_step(q, k, v, g, beta, factor, initial_state)
        return reference.gated_delta_rule(q, k, v, g, beta, factor, initial_state)
    if library.uses_gated_delta_library(v, g):
        operands = library.DeltaOperands(q, k, v, g, beta)
        return library.gated_delta_rule(operands, factor, initial_state, cu_seqlens, documents)
    if recurrent.uses_recurrence(q, k, v, beta, decay=g):
        return recurrent.run_recurrence(q, k, v, g, beta, factor, initial_state, starts_of(documents), cu_seqlens)
    if cu_seqlens is None:
        out, states = chunked.gated_delta_rule(q, k, v, g, beta, factor, initial_state, starts_of(documents))
        return out.to(v.dtype), states[-1]
    return _of_documents(q, k, v, g, beta, factor, initial_state, cu_seqlens)


def _of_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    leads = None
    if initial_state is not None:
        leads = writers_of(initial_state, k.shape[2], wide(q))
        ones = leads[2].new_ones(leads[2].shape[:3])
        still = torch.zeros_like(ones)
        leads += [still if g.dim() == 3 else still[..., None].expand(*ones.shape, k.shape[3]), ones]

    def rule(*parts: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, starts = parts
        return chunked.gated_delta_rule(q, k, v, g, beta, scale, None, starts)

    out, states = of_documents(rule, (q, k, v, g, beta), leads, cu_seqlens, wide(q))
    return out.to(v.dtype), states


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    rows = v.shape[:3]
    fits = v.dim() == 4 and k.dim() == 4 and q.shape == k.shape and k.shape[:2] == rows[:2] and beta.shape == rows
    if not fits or k.shape[2] == 0 or rows[2] % k.shape[2] or g.shape not in (rows, (*rows, k.shape[3])):
        shapes = ", ".join(
            f"{name} {list(x.shape)}" for name, x in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta))
        )
        raise ValueError(
            f"the gated delta rule has {shapes}; allowed: q and k [B, T, Hk, K], v [B, T, H, V] with H a multiple of "
            "Hk, g [B, T, H] or [B, T, H, K], beta [B, T, H]"
        )


def l2_normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x [..., D] divided by its L2 norm, with eps under the root, in float32 (float64 for float64)."""
    x = x.to(wide(x))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
