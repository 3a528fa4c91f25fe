"""Registered grouped GEMM: opaque to the compiler, because the row ranges are data; differentiable.

The splits stay a tensor from the router to here, so changing them never recompiles. On an accelerator they are read on
the device; on CPU reading them costs nothing. `choice` says which implementation runs.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..custom_op import Output, like, operation, register_gradient, takes
from ..gemm.accumulate import check_main_grad
from ..gemm.backends import hardware, record_choice
from . import reference
from .choice import choose_plain

_device_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def _product(a: Tensor, b: Tensor, transpose_b: bool) -> Output:
    return like(a, (a.shape[0], b.shape[1] if transpose_b else b.shape[2]))


_ROWS = takes("a: any [R, I]; b: any [G, N, K]; m_splits: any [G]; transpose_b: value; I == (K if transpose_b else N)")
_GRADIENT_TAKES = takes("dy: any [R, N]; x: any [R, K]; m_splits: any [_]")


@operation("grouped_gemm", _product, takes=_ROWS)
def grouped_gemm(a: Tensor, b: Tensor, m_splits: Tensor, transpose_b: bool = True) -> Tensor:
    """Multiply each group of rows by its own matrix.

    a: [T, K] with transpose_b, else [T, N]; b: [G, N, K]; m_splits: [G] integer, on a's device, rows per group.
    Returns [T, N] with transpose_b (fprop), else [T, K] (dgrad), in a's dtype with float32 accumulation; rows past
    the last group are zero. Raises ValueError where the splits exceed the rows (on CPU; on a device they are cut off,
    for reading them would make the host wait).
    """
    choice = choose_plain("grouped_gemm", a, b, hardware(a.device))
    record_choice(choice, strict=False)
    if choice.backend == "triton":
        from . import triton as kernels

        out = a.new_empty(a.shape[0], b.shape[1] if transpose_b else b.shape[2])
        return kernels.grouped_gemm(
            kernels.TileOperand.unscaled(a), kernels.TileOperand.unscaled(b if transpose_b else b.mT), m_splits, out
        )
    a, b = a.contiguous(), b.contiguous()
    if choice.backend == "loop":
        return reference.grouped_gemm(a, b, m_splits, transpose_b)
    offsets = m_splits.cumsum(0).to(torch.int32)
    return _zero_tail(_device_grouped_mm(a, b.transpose(1, 2) if transpose_b else b, offs=offsets), offsets)


def _gradient(dy: Tensor, x: Tensor, m_splits: Tensor) -> Output:
    return like(dy, (m_splits.shape[0], dy.shape[1], x.shape[1]))


@operation("grouped_gemm_wgrad", _gradient, takes=_GRADIENT_TAKES)
def grouped_gemm_wgrad(dy: Tensor, x: Tensor, m_splits: Tensor) -> Tensor:
    """Return each group's weight gradient `dy[g]^T @ x[g]`.

    dy: [T, N]; x: [T, K]; m_splits: [G] integer. Returns [G, N, K] in dy's dtype; zeros for empty groups.
    """
    choice = choose_plain("grouped_gemm_wgrad", dy, x, hardware(dy.device))
    record_choice(choice, strict=False)
    if choice.backend == "triton":
        from . import triton as kernels

        out = dy.new_empty(m_splits.shape[0], dy.shape[1], x.shape[1])
        return kernels.grouped_gemm_wgrad(
            kernels.TileOperand.unscaled(dy.t()), kernels.TileOperand.unscaled(x.t()), m_splits, out
        )
    dy, x = dy.contiguous(), x.contiguous()
    if choice.backend == "loop":
        return reference.grouped_gemm_wgrad(dy, x, m_splits)
    return _device_grouped_mm(dy.t(), x, offs=m_splits.cumsum(0).to(torch.int32))


def _zero_tail(y: Tensor, offsets: Tensor) -> Tensor:
    """The device's grouped GEMM leaves rows past the last group unwritten."""
    rows = torch.arange(y.shape[0], device=y.device)
    return torch.where((rows < offsets[-1])[:, None], y, 0)


@register_gradient(grouped_gemm, saves=("a", "b", "m_splits", "transpose_b"))
def _backward_gemm(saved: SimpleNamespace, needs: set[str], dy: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "a" in needs:
        found["a"] = grouped_gemm(dy, saved.b, saved.m_splits, not saved.transpose_b)
    if "b" in needs:
        left, right = (dy, saved.a) if saved.transpose_b else (saved.a, dy)
        found["b"] = grouped_gemm_wgrad(left, right, saved.m_splits)
    return found


@register_gradient(grouped_gemm_wgrad, saves=("dy", "x", "m_splits"))
def _backward_wgrad(saved: SimpleNamespace, needs: set[str], dw: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "dy" in needs:
        found["dy"] = grouped_gemm(saved.x, dw, saved.m_splits, True)
    if "x" in needs:
        found["x"] = grouped_gemm(saved.dy, dw, saved.m_splits, False)
    return found


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

        operands = kernels.TileOperand.unscaled(dy.t()), kernels.TileOperand.unscaled(x.t())
        record_choice(choice, strict=False)
        kernels.grouped_gemm_wgrad(*operands, m_splits, main_grad, factor=scale, accumulate=accumulate)
        return
    record_choice(choice._replace(backend="loop"), strict=False)
    reference.grouped_gemm_wgrad_accumulate(main_grad, dy, x, m_splits, accumulate, scale)
