"""One GEMM per group of rows, in high precision or under a recipe: the function behind every grouped module."""

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.permute import Permutation, permute
from te_models.kernels.without_autocast import compute_dtype

from ..quantizer.delayed import update_amax_
from ..quantizer.group_offsets import GroupOffsets
from ..tensor.quantized_tensor import QuantizedTensor
from .autograd import Arguments, Gemms
from .plain import largest, plain_grouped_linear
from .product import bias_rows_gradient
from .quantized_rows import is_aligned, rows_or_values
from .rows import row_alignment
from .scaling import GemmCall
from .three_gemms import stacked_values
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
    # as in `linear`
    plain = x.is_cpu and x.is_floating_point() and not torch.is_autocast_enabled("cpu")
    dtype = x.dtype if plain else compute_dtype(x)
    config = None if call is None else call.config
    quantizers = None if config is None else config.quantizers
    aligned = row_align > 1 and quantizers is not None and is_aligned(quantizers, x.device, row_align)
    if permutation is not None and not (aligned and permutation.padding_rows is not None):
        x, permutation = permute(x, permutation), None
    align = 1 if quantizers is None else row_alignment(quantizers, x.device)
    if permutation is None:
        quantized = isinstance(x, QuantizedTensor)
        x = rows_or_values(x, m_splits, quantizers, dtype, align) if quantized else x.to(dtype)
    aligned = aligned and not isinstance(x, QuantizedTensor)
    if call is None and bias is None:
        return plain_grouped_linear(x, weights, m_splits)
    offsets = GroupOffsets.of(m_splits, x.shape[0] if permutation is None else permutation.slot_of_row.shape[0])
    if call is not None and call.amaxes is not None:
        update_amax_(call.amaxes[0], offsets.amax(x))
        update_amax_(call.amaxes[1], largest(stacked_values(weights)))
    if call is None or config is None:
        y = plain_grouped_linear(x, weights, m_splits)
    else:
        # the permutation's counts may be the splits themselves, and no tensor may be given twice
        order = (None, None, None)
        if permutation is not None:
            order = permutation.slot_of_row, permutation.row_of_slot, permutation.padding_rows
        needs = False, False
        if torch.is_grad_enabled():  # as in `linear_function`
            one = len(weights) == 1
            needs = x.requires_grad, weights[0].requires_grad if one else any(w.requires_grad for w in weights)
        wgrad = config.options.wgrad
        arguments = Arguments(
            x,
            None,
            call.cached,
            *call.state,
            *config,
            dtype,
            *needs,
            None,
            None,
            None,
            *order,
            offsets.m_splits,
            offsets.ends,
            offsets.group,
            align,
            aligned,
            len(weights),
        )
        y = Gemms.apply(*arguments, *weights, *(() if wgrad is None else main_grads(wgrad)))
    return y if bias is None else y + _BiasRows.apply(bias.to(dtype), *offsets.tensors())


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
