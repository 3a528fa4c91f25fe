"""Public state spaces: on CUDA the kernels of `mamba-ssm` where they are installed, else the chunked forms.

B batch, T tokens, H heads of P channels, G groups of heads, D channels, N states, M documents.
"""

from torch import Tensor

from .. import recurrent
from ..chunks import check_cu_seqlens
from . import chunked, library, reference


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scan of Mamba-2: S = exp(dt A) S + dt x B^T; y = S C + D x, of each head (arXiv 2405.21060).

    x: [B, T, H, P]; dt: [B, T, H], 0 or more; A: [H], below 0; B, C: [B, T, G, N], a group serves H / G consecutive
    heads; D: [H] or None. initial_state: [B, H, P, N]; None: zeros. cu_seqlens: [M + 1] int, where documents of the
    only row begin, and where the last one ends: states are then [M, H, P, N]. documents: [B, T] int, in whose place
    neighbours with the same number are a document; the first goes on from initial_state, the others from zeros.

    Returns y [B, T, H, P] in x's dtype and the states behind the last token, or behind each document of cu_seqlens, in
    float32 (float64 for float64), the dtype of the sums. Raises ValueError for shapes that do not fit, and for both
    cu_seqlens and documents.
    """
    fits = (
        x.dim() == 4 and B.dim() == 4 and B.shape == C.shape and x.shape[:3] == dt.shape and x.shape[:2] == B.shape[:2]
    )
    if not fits or A.shape != x.shape[2:3] or B.shape[2] == 0 or x.shape[2] % B.shape[2]:
        raise ValueError(
            f"the state space has {_shapes(x, dt, A, B, C)}; allowed: x [B, T, H, P], dt [B, T, H], A [H], B and C [B, "
            "T, G, N] with H a multiple of G"
        )
    check_cu_seqlens(cu_seqlens, documents, x.shape[0], initial_state, (*x.shape[2:], B.shape[3]))
    if x.shape[1] == 0 or (x.shape[1] == 1 and cu_seqlens is None):
        if recurrent.step.uses_recurrent_step(B.shape[3], x, dt, A, B, C, D, initial_state):
            return recurrent.step.space_step(x, dt, A, B, C, D, initial_state)
        return reference.state_space_scan(x, dt, A, B, C, D, initial_state)
    scan = library.state_space_scan if library.uses_scan_library(x) else chunked.state_space_scan
    return scan(x, dt, A, B, C, D, initial_state, cu_seqlens, documents)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scan of Mamba: S = exp(dt A) S + dt x B^T; y = S C + D x, of each channel (arXiv 2312.00752).

    x, dt: [B, T, D]; A: [D, N], below 0; B, C: [B, T, N]; D: [D] or None. initial_state: [B, D, N], [M, D, N] with
    cu_seqlens; None: zeros. The other arguments, the results and the errors are as of `state_space_scan`.
    """
    fits = x.dim() == 3 and x.shape == dt.shape and B.shape == C.shape == (*x.shape[:2], *A.shape[1:])
    if not fits or A.shape[:1] != x.shape[2:]:
        raise ValueError(
            f"the selective scan has {_shapes(x, dt, A, B, C)}; allowed: x and dt [B, T, D], A [D, N], B and C "
            "[B, T, N]"
        )
    check_cu_seqlens(cu_seqlens, documents, x.shape[0], initial_state, tuple(A.shape))
    if x.shape[1] == 0 or (x.shape[1] == 1 and cu_seqlens is None):
        return reference.selective_scan(x, dt, A, B, C, D, initial_state)
    return chunked.selective_scan(x, dt, A, B, C, D, initial_state, cu_seqlens, documents)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in zip(("x", "dt", "A", "B", "C"), tensors, strict=True))
