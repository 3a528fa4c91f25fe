"""Grouped weight gradients added in place into a persistent gradient (`main_grad`)."""

from __future__ import annotations

from torch import Tensor

from ..custom_op import operation
from ..gemm.accumulate import check_main_grad
from ..gemm.backends import hardware, record
from . import reference
from .choice import choose_plain


@operation("grouped_gemm_wgrad_accumulate_", lambda: None, mutates=("main_grad",))
def grouped_gemm_wgrad_accumulate_(
    main_grad: Tensor, dy: Tensor, x: Tensor, m_splits: Tensor, accumulate: bool = True, scale: Tensor | None = None
) -> None:
    """Add each group's `scale[g] * dy[g]^T @ x[g]` to main_grad[g], or write it there where `accumulate` is False.

    main_grad: [G, N, K] float32 or bfloat16, requiring no gradient; dy: [T, N] and x: [T, K] of one dtype; m_splits:
    [G] integer, rows per group; scale: [G] float32 or None for 1. A group without rows is left alone when
    accumulating, zero when writing. Raises ValueError on other shapes and dtypes.
    """
    check_main_grad(main_grad, dy, x, (m_splits.shape[0], dy.shape[1], x.shape[1]))
    choice = choose_plain("grouped_gemm_wgrad_accumulate_", dy, x, hardware(dy.device))
    # torch's own grouped GEMM does not accumulate: the loop does
    if choice.backend == "triton":
        from . import triton as kernels

        sides = kernels.Side.plain(dy.t()), kernels.Side.plain(x.t())
        record(choice, strict=False)
        kernels.grouped_gemm_wgrad(*sides, m_splits, main_grad, factor=scale, accumulate=accumulate)
        return
    record(choice._replace(backend="loop"), strict=False)
    reference.grouped_gemm_wgrad_accumulate(main_grad, dy, x, m_splits, accumulate, scale)
