"""Public short convolution: on CUDA the kernels of `causal-conv1d` where they are installed, else plain torch.

B batch, T tokens, D channels, W width, M documents.
"""

from torch import Tensor

from te_models.suggestions import shown

from ..chunks import check_cu_seqlens
from . import chunked, library


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the causal convolution of each channel with its own taps, and the values that the next tokens need.

    x: [B, T, D]; weight: [D, W], the last tap is the token's own; bias: [D] or None; activation: "silu" or None.
    initial_state: [B, D, W - 1], the values before x; None: zeros. cu_seqlens: [M + 1] int, where documents of the only
    row begin, and where the last one ends: states are then [M, D, W - 1]. documents: [B, T] int, in whose place
    neighbours with the same number are a document; the first goes on from initial_state, the others from zeros.

    Returns y [B, T, D] in x's dtype, summed in float32 (float64 for float64), and the last values [B, D, W - 1], or of
    each document of cu_seqlens. Raises ValueError for shapes that do not fit, another activation, and for both
    cu_seqlens and documents.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(
            f"the convolution has x {list(x.shape)} and weight {list(weight.shape)}; allowed: [B, T, D] and [D, W]"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {shown(activation)}; allowed: 'silu' or None")
    check_cu_seqlens(cu_seqlens, documents, x.shape[0], initial_state, (x.shape[2], weight.shape[1] - 1))
    convolve = library.short_convolution if library.uses_convolution_library(x, weight) else chunked.short_convolution
    return convolve(x, weight, bias, activation, initial_state, cu_seqlens, documents)
