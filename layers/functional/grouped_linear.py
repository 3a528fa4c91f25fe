"""One GEMM per group of rows, in high precision or under a recipe, differentiable: the function behind GroupedLinear.

`grouped_gemms` holds the three GEMMs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.grouped_gemm import stored_grouped_gemm
from te_models.kernels.permute import Permutation, permute, unpermute
from te_models.kernels.torch_versions import own_result
from te_models.kernels.without_autocast import compute_dtype

from ..quantizer.delayed import update_amax_
from ..quantizer.group_offsets import GroupOffsets
from ..quantizer.state import QuantizerState
from ..recipe.base import GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from .gemm_operand import stored_for_few_rows
from .grouped_gemms import (
    bias_rows_gradient,
    grouped_fprop,
    grouped_gemm_directly,
    grouped_gradients,
    plain_weights,
    row_alignment,
    stacked,
)
from .grouped_operand import is_aligned, permuted, rows_or_values
from .linear import GemmCall, largest
from .scaling import GemmConfig, GemmOptions, Scaling
from .wgrad import main_grads


def grouped_linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    m_splits: Tensor,
    call: GemmCall | None,
    *,
    permutation: Permutation | None = None,
    row_align: int = 1,
) -> Tensor:
    """Return `x[g] @ weight[g]^T + bias[g]` for each group of rows.

    x: [T, K], or rows quantized already, `GroupedRows` under the same splits: those that the recipe's input quantizer
    would have made are not quantized again. weights: one [G, N, K] tensor, or G of [N, K]; bias: [G, N] or None;
    m_splits: [G] integer. Rows past the last group are zero. call: what the module computes it with, None for plain
    high precision.
    permutation: x are tokens, and the rows are what `permute` makes of them. row_align: a number that all splits are
    multiples of, the rows that fill them up being zeros.
    """
    dtype = compute_dtype(x)
    config = None if call is None else call.config
    quantizers = None if config is None else config.quantizers
    aligned = quantizers is not None and is_aligned(quantizers, x.device, row_align)
    if permutation is not None and not (aligned and permutation.padding_rows is not None):
        x, permutation = permute(x, permutation), None
    if permutation is None:
        align = 1 if quantizers is None else row_alignment(quantizers, x.device)
        x = rows_or_values(x, m_splits, quantizers, dtype, align)
    aligned = aligned and not isinstance(x, QuantizedTensor)
    if call is None and bias is None:
        return _high_precision(x, weights, m_splits, dtype)
    offsets = GroupOffsets.of(m_splits, x.shape[0] if permutation is None else permutation.slot_of_row.shape[0])
    if call is not None and call.amaxes is not None:
        update_amax_(call.amaxes[0], offsets.amax(x))
        update_amax_(call.amaxes[1], largest(stacked(weights)))
    if call is None or config is None:
        y = _high_precision(x, weights, m_splits, dtype)
    else:
        # the permutation's counts may be the splits themselves, and no tensor may be given twice
        order = (None, None, None)
        if permutation is not None:
            order = permutation.slot_of_row, permutation.row_of_slot, permutation.padding_rows
        grad = torch.is_grad_enabled()  # as in `linear`
        needs = (grad and x.requires_grad, grad and any(w.requires_grad for w in weights))
        arguments = _Arguments(
            x, *order, *offsets.tensors(), call.cached, *call.state, *needs, dtype, *config, aligned, len(weights)
        )
        y = _GroupedLinear.apply(*arguments, *weights, *main_grads(config.options.wgrad))
    return y if bias is None else y + _BiasRows.apply(bias.to(dtype), *offsets.tensors())


def _high_precision(x: Tensor, weights: tuple[Tensor, ...], m_splits: Tensor, dtype: torch.dtype) -> Tensor:
    """The GEMMs without a recipe; a stored weight is multiplied as it is where that is faster."""
    weight = weights[0]
    if weight.dim() == 3 and isinstance(weight, QuantizedTensor):
        stored = stored_for_few_rows(x, weight)
        if stored is not None:
            return stored_grouped_gemm(x, stored, m_splits)
    return grouped_gemm_directly(x, plain_weights(weights, dtype), m_splits)


def add_bias_rows(y: Tensor, bias: Tensor, m_splits: Tensor) -> Tensor:
    """Return y: [T, N] plus bias: [G, N] of each row's group."""
    return y + _BiasRows.apply(bias.to(y.dtype), *GroupOffsets.of(m_splits, y.shape[0]).tensors())


class _BiasRows(torch.autograd.Function):
    """bias: [G, N] -> [T, N], each row its group's."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, m_splits: Tensor, ends: Tensor, group: Tensor) -> Tensor:
        ctx.save_for_backward(m_splits)
        return GroupOffsets(m_splits, ends, group).per_row(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (m_splits,) = ctx.saved_tensors
        return bias_rows_gradient(dy, m_splits), None, None, None


class _Arguments(NamedTuple):
    """x: [T, K] in `dtype`, the GEMMs' dtype, or quantized; where slot_of_row, row_of_slot and padding_rows of a
    Permutation are given, x are tokens [tokens, K] of any dtype, and the rows are made of them. m_splits, ends, group:
    of GroupOffsets; scale to gradient_log: of QuantizerState; needs_x, needs_weights: whether the gradients of x and of
    the weights are wanted; quantizers to index: of GemmConfig; count: how many weights. Behind these come the weights,
    one [G, N, K] or G of [N, K], plain or quantized, and then the main gradients, if there are any."""

    x: Any
    slot_of_row: Any
    row_of_slot: Any
    padding_rows: Any
    m_splits: Any
    ends: Any
    group: Any
    cached: Any
    scale: Any
    amax: Any
    gradient: Any
    statistics: Any
    grad_statistics: Any
    key: Any
    gradient_log: Any
    needs_x: bool
    needs_weights: bool
    dtype: torch.dtype
    quantizers: GemmQuantizers
    options: GemmOptions
    index: int | None
    aligned: bool
    count: int


class _Saved(NamedTuple):
    """What autograd saves in front of the weights and of what fprop left for wgrad."""

    slot_of_row: Any
    row_of_slot: Any
    padding_rows: Any
    m_splits: Any
    ends: Any
    group: Any
    cached: Any
    scale: Any
    key: Any


_NO_GRADIENTS: Any = _Arguments(*(None,) * len(_Arguments._fields))  # type: ignore[arg-type]


def _permutation(of: _Arguments | _Saved) -> Permutation | None:
    """Rebuild the permutation, if there is one; the counts, which nobody reads here, are the splits."""
    if of.slot_of_row is None:
        return None
    return Permutation(of.slot_of_row, of.row_of_slot, of.m_splits, of.m_splits, of.padding_rows)


class _GroupedLinear(torch.autograd.Function):
    """The grouped layer without a bias. Arguments: `_Arguments`, weights, main gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        fixed = len(_Arguments._fields)
        a, tensors = _Arguments(*arguments[:fixed]), arguments[fixed:]
        weights = tensors[: a.count]
        state = QuantizerState(a.scale, a.amax, a.gradient, a.statistics, a.grad_statistics, a.key)
        scaling = Scaling(GemmConfig(a.quantizers, a.options, a.index), state)
        offsets, order = GroupOffsets(a.m_splits, a.ends, a.group), _permutation(a)
        x = a.x if order is None else permuted(a.x, order, a.quantizers, a.dtype)
        needs = (a.needs_x, a.needs_weights)
        y, ctx.saved, left = grouped_fprop(x, weights, a.cached, offsets, scaling, a.dtype, needs, a.aligned)
        saved = _Saved(a.slot_of_row, a.row_of_slot, a.padding_rows, *offsets.tensors(), a.cached, a.scale, a.key)
        ctx.save_for_backward(*saved, *weights, *left)
        # not saved, as in `_DenseLinear`
        ctx.main_grads, ctx.grad_statistics = tensors[a.count :], a.grad_statistics
        ctx.gradient, ctx.gradient_log = a.gradient, a.gradient_log
        ctx.config, ctx.dtype, ctx.count = (a.quantizers, a.options, a.index), a.dtype, a.count
        ctx.aligned, ctx.x_dtype = a.aligned, a.x.dtype
        return own_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # read once: a checkpoint of another library recomputes for one reading
        tensors = ctx.saved_tensors
        fixed, begin = len(_Saved._fields), len(_Arguments._fields)
        s, rest = _Saved(*tensors[:fixed]), tensors[fixed:]
        needs = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[begin : begin + ctx.count]))
        config = GemmConfig(*ctx.config)
        dx, dw = grouped_gradients(
            dy,
            tuple(rest[: ctx.count]),
            s.cached,
            ctx.main_grads,
            GroupOffsets(s.m_splits, s.ends, s.group),
            Scaling.of_backward(config, s.scale, s.key, ctx.gradient, ctx.gradient_log, ctx.grad_statistics),
            ctx.saved,
            list(rest[ctx.count :]),
            ctx.dtype,
            needs,
            ctx.aligned,
        )
        order = _permutation(s)
        if dx is not None and order is not None:
            dx = unpermute(dx, order, None, dtype=ctx.x_dtype)
        return *_NO_GRADIENTS._replace(x=dx), *dw, *(None,) * len(ctx.main_grads)


# --- buffers of the caller: rows past the last group stay as they are, so one may be longer than what a step fills ---


def written_into(y: Tensor, out: Tensor, m_splits: Tensor) -> Tensor:
    """Write y: [T, C] over `out`, of its shape and dtype, and return that with y's history. m_splits: [G]. ValueError
    for a buffer that does not fit."""
    _check_buffer("out", out, y)
    return out.copy_(torch.where(_inside(y, m_splits), y, out))


def gradient_into(x: Tensor, dgrad_out: Tensor, m_splits: Tensor | None) -> Tensor:
    """Return x: [T, C], whose gradient will be written over `dgrad_out`, of its shape and dtype. m_splits: [G], None
    where all rows are written. ValueError for a buffer that does not fit."""
    _check_buffer("dgrad_out", dgrad_out, x)
    return _GradientInto.apply(x, dgrad_out, m_splits)


def _check_buffer(name: str, buffer: Tensor, like: Tensor) -> None:
    """Raise ValueError unless a buffer can take the place of a tensor `like` this one."""
    if (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
        got, allowed = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (buffer, like))
        raise ValueError(f"{name} is {got}; allowed: {allowed}")
    if buffer.requires_grad or not buffer.is_contiguous():
        raise ValueError(
            f"{name} requires a gradient or is not contiguous; allowed: a contiguous buffer, {name}.detach() where it "
            "was used before"
        )


def _inside(x: Tensor, m_splits: Tensor) -> Tensor:
    """Return whether each row of x: [T, C] belongs to a group: [T, 1]."""
    return (torch.arange(x.shape[0], device=x.device) < m_splits.sum())[:, None]


class _GradientInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, m_splits: Tensor | None) -> Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(m_splits)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dx,), (m_splits,) = grads, ctx.saved_tensors
        if m_splits is not None:
            dx = torch.where(_inside(dx, m_splits), dx, ctx.buffer)
        ctx.buffer.copy_(dx)
        return ctx.buffer, None, None
