"""Grouped GEMM on quantized operands: rows times their group's matrix, and weight gradients.

Operands are `ScaledOperand` views with the contracted dimension last: rows [T, K] by weights [G, N, K] for fprop and
dgrad (which takes the weight's columnwise copy), and columnwise copies [N, T] by [K, T] for wgrad. Per-tensor scales
and NVFP4 amaxes are one per group, [G]. As with `scaled_gemm`, on CPU the compiler sees plain torch; on an accelerator
this is one registered op that picks a backend at run time and never reads the splits on the host, but for the loop.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from ..compiling import compiling
from ..custom_op import Output, flatten, like, operation
from ..gemm.backends import BackendChoice, hardware, in_plain_torch, record_choice
from ..gemm.cpu import unrounded
from ..gemm.op import scaled_gemm
from ..gemm.operand import Operand, ScaledOperand, emulation_dtype, k_contiguous
from ..gemm.reference import epilogue_scale, scaled
from .choice import choose_scaled
from .op import grouped_gemm, grouped_gemm_wgrad, grouped_gemm_wgrad_accumulate_
from .reference import check_alignment, split_bounds

# Rows that one scale spans in a wgrad operand, and that a device wants groups to begin at a multiple of.
ROW_ALIGNMENT = {"per_tensor": 16, "e8m0": 32, "float32": 128, "pow2": 128, "nvfp4": 16}


def scaled_grouped_gemm(
    left: ScaledOperand,
    right: ScaledOperand,
    m_splits: Tensor,
    out_dtype: torch.dtype,
    *,
    split_accumulation: bool = True,
    strict: bool = False,
) -> Tensor:
    """Return each row's product with its group's matrix, [T, N] in `out_dtype`; zero past the last group.

    left: rows [T, K], blocks of one row; right: [G, N, K]; m_splits: [G] integer, rows per group. split_accumulation,
    strict: as in `scaled_gemm`. Raises ValueError where operands do not fit, and where splits exceed the rows (on CPU;
    on a device they are cut off, for reading them would make the host wait).
    """
    _check_rows(left, right, m_splits)
    if in_plain_torch(left.data.device):
        record_choice(_choose("scaled_grouped_gemm", left, right, out_dtype), strict=strict)
        return emulated_rows(left, right, m_splits, out_dtype)
    return _rows(*flatten(left), *flatten(right), m_splits, out_dtype, split_accumulation, strict)


def scaled_grouped_gemm_wgrad(
    left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype, *, strict: bool = False
) -> Tensor:
    """Return each group's `left @ right^T` over its rows, [G, N, K] in `out_dtype`; zeros for an empty group.

    left: [N, T]; right: [K, T], both scaled along the rows. Every split is a multiple of `ROW_ALIGNMENT` rows, padded
    with zeros, so that no block spans two groups: ValueError on CPU, unchecked on a device.
    """
    shape = (m_splits.shape[0], left.outer, right.outer)
    if in_plain_torch(left.data.device):
        _check_wgrad(left, right, m_splits, shape)
        record_choice(_choose("scaled_grouped_gemm_wgrad", left, right, out_dtype), strict=strict)
        return emulated_wgrad(left, right, m_splits, out_dtype)
    out = left.data.new_empty(shape, dtype=out_dtype)
    scaled_grouped_gemm_wgrad_accumulate_(out, left, right, m_splits, accumulate=False, strict=strict)
    return out


def scaled_grouped_gemm_wgrad_accumulate_(
    main_grad: Tensor,
    left: ScaledOperand,
    right: ScaledOperand,
    m_splits: Tensor,
    *,
    accumulate: bool = True,
    strict: bool = False,
) -> None:
    """Add each group's `left @ right^T` over its rows to main_grad [G, N, K], or write it there.

    As `scaled_grouped_gemm_wgrad`; an empty group is left alone when accumulating, zero when writing.
    """
    _check_wgrad(left, right, m_splits, tuple(main_grad.shape))
    if in_plain_torch(left.data.device):
        record_choice(_choose("scaled_grouped_gemm_wgrad", left, right, main_grad.dtype), strict=strict)
        emulated_wgrad_accumulate_(main_grad, left, right, m_splits, accumulate)
    else:
        _wgrad_accumulate_(main_grad, *flatten(left), *flatten(right), m_splits, accumulate, strict)


def _choose(operation: str, left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype) -> BackendChoice:
    return choose_scaled(operation, left, right, out_dtype, hardware(left.data.device))


def _check_rows(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor) -> None:
    groups = m_splits.shape[0]
    left.check("left", groups)
    right.check("right", groups)
    if left.data.dim() != 2 or right.data.dim() != 3 or right.data.shape[0] != groups:
        shapes = f"{tuple(left.data.shape)} and {tuple(right.data.shape)}"
        raise ValueError(f"a grouped GEMM of {groups} groups takes rows [T, K] and weights [G, N, K], got {shapes}")
    if left.inner != right.inner:
        raise ValueError(f"left contracts {left.inner} values and right {right.inner}; both have the same K")
    if left.block is not None and left.block[0] != 1:
        raise ValueError(f"left.block is {left.block}; a block of several rows could span two groups")


def _check_wgrad(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, shape: tuple[int, ...]) -> None:
    groups = m_splits.shape[0]
    left.check("left", groups)
    right.check("right", groups)
    if left.data.dim() != 2 or right.data.dim() != 2 or left.inner != right.inner:
        shapes = f"{tuple(left.data.shape)} and {tuple(right.data.shape)}"
        raise ValueError(f"a grouped weight gradient takes [N, T] and [K, T] with one number of rows T, got {shapes}")
    if shape != (groups, left.outer, right.outer):
        raise ValueError(f"main_grad is {shape}, but the weight gradient is {(groups, left.outer, right.outer)}")
    for name, operand in (("left", left), ("right", right)):
        if operand.block is not None and operand.block[0] != 1:
            raise ValueError(f"{name}.block is {operand.block}; a weight gradient takes blocks along the rows only")
    if m_splits.device.type == "cpu" and not compiling():
        check_alignment(m_splits, max(ROW_ALIGNMENT[left.kind], ROW_ALIGNMENT[right.kind]))


def _products(left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype) -> Output:
    return like(left.data, (left.outer, right.outer), out_dtype)


@operation("scaled_grouped_gemm", _products)
def _rows(
    left: ScaledOperand,
    right: ScaledOperand,
    m_splits: Tensor,
    out_dtype: torch.dtype,
    split_accumulation: bool,
    strict: bool,
) -> Tensor:
    choice = _choose("scaled_grouped_gemm", left, right, out_dtype)
    record_choice(choice, strict=strict)
    if choice.backend == "triton":
        from . import triton as kernels

        out = left.data.new_empty((left.outer, right.outer), dtype=out_dtype)
        tiles = kernels.TileOperand.of(left), kernels.TileOperand.of(right)
        return kernels.grouped_gemm(*tiles, m_splits, out, split_accumulation=split_accumulation)
    if choice.backend == "native":
        return _native_rows(left, right, m_splits, split_accumulation)
    if choice.backend == "loop":
        return _loop(left, right, m_splits, out_dtype, split_accumulation)
    return emulated_rows(left, right, m_splits, out_dtype)


@operation("scaled_grouped_gemm_wgrad_accumulate_", lambda: None, mutates=("main_grad",))
def _wgrad_accumulate_(
    main_grad: Tensor,
    left: ScaledOperand,
    right: ScaledOperand,
    m_splits: Tensor,
    accumulate: bool,
    strict: bool,
) -> None:
    choice = _choose("scaled_grouped_gemm_wgrad", left, right, main_grad.dtype)
    record_choice(choice, strict=strict)
    if choice.backend == "triton":
        from . import triton as kernels

        tiles = kernels.TileOperand.of(left), kernels.TileOperand.of(right)
        kernels.grouped_gemm_wgrad(*tiles, m_splits, main_grad, accumulate=accumulate)
    else:
        emulated_wgrad_accumulate_(main_grad, left, right, m_splits, accumulate)


def _native_rows(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, split_accumulation: bool) -> Tensor:
    """Per-tensor E4M3 into bfloat16: torch takes one scale per row and per column, so each group's is repeated."""
    ends = m_splits.cumsum(0)
    total, members = left.outer, right.data.shape[0]
    y = F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
        k_contiguous(left.data),
        k_contiguous(right.data).mT,
        per_row(left.scale_inv, m_splits, total),
        ScalingType.RowWise,
        right.scale_inv[:, None].expand(members, right.outer).contiguous(),
        ScalingType.RowWise,
        offs=ends.to(torch.int32),
        output_dtype=torch.bfloat16,
        use_fast_accum=not split_accumulation,
    )
    # rows past the last group are left unwritten
    return torch.where((torch.arange(total, device=y.device) < ends[-1])[:, None], y, 0)


def _loop(
    left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype, split_accumulation: bool
) -> Tensor:
    """One scaled GEMM per group. The host waits for the splits."""
    out = left.data.new_zeros((left.outer, right.outer), dtype=out_dtype)
    for g, (begin, end) in enumerate(split_bounds(m_splits, left.outer)):
        if end > begin:
            scale = left.scale_inv[g] if left.block is None else left.scale_inv[begin:end]
            amax = None if left.amax is None else left.amax[g]
            mine = left._replace(data=left.data[begin:end], scale_inv=scale, amax=amax)
            out[begin:end] = scaled_gemm(mine, right.member(g), out_dtype, split_accumulation=split_accumulation)
    return out


def emulated_rows(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[T, K] x [G, N, K] -> [T, N]."""
    dtype = emulation_dtype(left, right, out_dtype)
    a, b = left.dequantized(dtype), right.dequantized(dtype)
    factor = epilogue_scale(a, b)
    x, w = (a.values, b.values) if factor is None else unrounded(a.values, b.values)
    y = grouped_gemm(x, w, m_splits)
    if factor is None:
        return y.to(out_dtype)
    return scaled(y, per_row(factor, m_splits, y.shape[0])[:, None], out_dtype)


def emulated_wgrad(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[N, T] x [K, T] -> [G, N, K]."""
    dtype = emulation_dtype(left, right, out_dtype)
    return dequantized_wgrad(left.dequantized(dtype), right.dequantized(dtype), m_splits, out_dtype)


def dequantized_wgrad(a: Operand, b: Operand, m_splits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[N, T] x [K, T] -> [G, N, K], of dequantized operands; a scale that is left is one for each group."""
    factor = epilogue_scale(a, b)
    rounds = factor is None and out_dtype != torch.float32  # eager code may have made the operands in float32
    dy, x = (a.values, b.values) if rounds else unrounded(a.values, b.values)
    dw = grouped_gemm_wgrad(dy.mT, x.mT, m_splits)
    if factor is None:
        return dw.to(out_dtype)
    of_rows = factor[:, None].expand(dw.shape[:2]).reshape(-1, 1)
    return scaled(dw.flatten(0, 1), of_rows, out_dtype).view(dw.shape)


def emulated_wgrad_accumulate_(
    main_grad: Tensor, left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, accumulate: bool
) -> None:
    """[N, T] x [K, T] into [G, N, K]."""
    dtype = emulation_dtype(left, right, main_grad.dtype)
    a, b = left.dequantized(dtype), right.dequantized(dtype)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, m_splits, accumulate, epilogue_scale(a, b))


def per_row(values: Tensor, m_splits: Tensor, rows: int) -> Tensor:
    """Return values[group of the row], [T], for values [G]; 0 past the last group. Never reads the splits."""
    ends = m_splits.cumsum(0)
    group = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
    groups = values.shape[0]
    return torch.where(group < groups, values[group.clamp(max=groups - 1)], 0)
