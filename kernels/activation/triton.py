"""Activation kernels: one pass over the input in either direction, several elements per thread.

T rows, F output columns; the input has 2F when gated, [gate | up]. Forward rounds wherever the reference rounds.
Backward is float32 throughout with one rounding: closer to the exact gradient than autograd's chain.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import QUICK_GELU_ALPHA, ActivationKind

_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)
_TANH_SCALE: tl.constexpr = tl.constexpr(0.7978845608028654)
_TANH_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_QUICK_GELU_ALPHA: tl.constexpr = tl.constexpr(QUICK_GELU_ALPHA)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, NAME: tl.constexpr):
    """The activation NAME of float32 x. A NaN stays."""
    if NAME == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        # (1 + tanh u) / 2 is computed as sigmoid(2 u), without cancellation.
        y = x * sigmoid((x + x * x * x * _TANH_CUBIC) * (2.0 * _TANH_SCALE))
    elif NAME == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif NAME == "sigmoid":
        y = sigmoid(x)
    elif NAME == "quick_gelu":
        y = x * sigmoid(x * _QUICK_GELU_ALPHA)
    else:
        tl.static_assert(NAME == "squared_relu", "unknown activation")
        y = tl.where(x <= 0, 0.0, x)
        y = y * y
    return y


@triton.jit
def slope(x, NAME: tl.constexpr):
    """The derivative of `activate`."""
    if NAME == "silu":
        s = sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    elif NAME == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        s = sigmoid((x + x * x * x * _TANH_CUBIC) * (2.0 * _TANH_SCALE))
        y = s + x * s * (1.0 - s) * (1.0 + x * x * (3.0 * _TANH_CUBIC)) * (2.0 * _TANH_SCALE)
    elif NAME == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif NAME == "sigmoid":
        s = sigmoid(x)
        y = s * (1.0 - s)
    elif NAME == "quick_gelu":
        s = sigmoid(x * _QUICK_GELU_ALPHA)
        y = s * (1.0 + x * _QUICK_GELU_ALPHA * (1.0 - s))
    else:
        tl.static_assert(NAME == "squared_relu", "unknown activation")
        y = tl.where(x <= 0, 0.0, 2.0 * x)
    return y


@triton.jit
def round_as(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def at_most(x, limit):
    return tl.where(x > limit, limit, x)


@triton.jit
def gate_and_up(gate, up, alpha, offset, limit, NAME: tl.constexpr, CLAMPED: tl.constexpr, X: tl.constexpr):
    """`act(gate) * up` in float32, every step rounded to X as the reference does."""
    if CLAMPED:
        gate, up = at_most(gate, limit), at_most(-at_most(-up, limit), limit)
        gate = round_as(gate * round_as(sigmoid(round_as(alpha * gate, X)), X), X)
        up = round_as(up + offset, X)
    else:
        gate = round_as(activate(gate, NAME), X)
    return round_as(gate * up, X)


@triton.jit
def activation_tile(
    x_ptr,
    rows,
    columns,
    inside,
    alpha,
    offset,
    limit,
    F: tl.constexpr,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Load a tile of the input and return its activation, float32 values that are exact in the input's dtype."""
    X: tl.constexpr = x_ptr.dtype.element_ty
    if GATED:
        at = rows[:, None] * (2 * F) + columns[None, :]
        gate = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
        y = gate_and_up(gate, up, alpha, offset, limit, NAME, CLAMPED, X)
    else:
        x = tl.load(x_ptr + rows[:, None] * F + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        y = round_as(activate(x, NAME), X)
    return y


@triton.jit
def tile_of_program(num_rows, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's rows (int64), columns and which of the tile is inside; columns run fastest."""
    program, across = tl.program_id(0), tl.cdiv(F, BLOCK_C)
    rows = (program // across).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = (program % across) * BLOCK_C + tl.arange(0, BLOCK_C)
    return rows, columns, (rows < num_rows)[:, None] & (columns < F)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def activation_fwd_kernel(
    x_ptr,
    probability_ptr,
    y_ptr,
    num_rows,
    alpha,
    offset,
    limit,
    F: tl.constexpr,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows, columns, inside = tile_of_program(num_rows, F, BLOCK_R, BLOCK_C)
    y = activation_tile(x_ptr, rows, columns, inside, alpha, offset, limit, F, NAME, GATED, CLAMPED)
    if probability_ptr is not None:
        y *= tl.load(probability_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + rows[:, None] * F + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def activation_bwd_kernel(
    dy_ptr,
    x_ptr,
    probability_ptr,
    dx_ptr,
    d_probability_ptr,
    num_rows,
    alpha,
    offset,
    limit,
    F: tl.constexpr,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows, columns, inside = tile_of_program(num_rows, F, BLOCK_R, BLOCK_C)
    dy = tl.load(dy_ptr + rows[:, None] * F + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if d_probability_ptr is not None:
        y = activation_tile(x_ptr, rows, columns, inside, alpha, offset, limit, F, NAME, GATED, CLAMPED)
        across = tl.cdiv(F, BLOCK_C)
        part = rows * across + tl.program_id(0) % across
        tl.store(d_probability_ptr + part, tl.sum(tl.where(inside, dy * y, 0.0), axis=1), mask=rows < num_rows)
    if probability_ptr is not None:
        dy *= tl.load(probability_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    if GATED:
        at = rows[:, None] * (2 * F) + columns[None, :]
        gate = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            gate_moves, up_moves = gate <= limit, (up >= -limit) & (up <= limit)
            gate, up = at_most(gate, limit), at_most(-at_most(-up, limit), limit) + offset
            s = sigmoid(alpha * gate)
            d_gate = tl.where(gate_moves, dy * up * s * (1.0 + alpha * gate * (1.0 - s)), 0.0)
            d_up = tl.where(up_moves, dy * gate * s, 0.0)
        else:
            d_gate = dy * up * slope(gate, NAME)
            d_up = dy * activate(gate, NAME)
        tl.store(dx_ptr + at, d_gate.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + at + F, d_up.to(dx_ptr.dtype.element_ty), mask=inside)
    else:
        at = rows[:, None] * F + columns[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (dy * slope(x, NAME)).to(dx_ptr.dtype.element_ty), mask=inside)


def tile_of_activations(columns: int) -> tuple[int, int]:
    """Return (rows, columns) of a program's tile of 2048 outputs."""
    block = min(2048, triton.next_power_of_2(columns))
    return 2048 // block, block


def arguments_of(kind: ActivationKind, dtype: torch.dtype) -> tuple[tuple[float, float, float], dict[str, Any]]:
    """Return alpha, offset and limit, and NAME to CLAMPED. The limit is the clamp as PyTorch applies it: rounded to the
    values' dtype."""
    limit = 0.0 if kind.clamp is None else torch.tensor(kind.clamp, dtype=dtype, device="cpu").item()
    constants = {"NAME": kind.name, "GATED": kind.gated, "CLAMPED": kind.clamp is not None}
    return (kind.alpha, kind.up_offset, limit), constants


def activation_fwd(x: Tensor, probabilities: Tensor | None, kind: ActivationKind) -> Tensor:
    """Return the activation [T, F] of x: [T, 2F] if gated, else [T, F]; times probabilities [T] if given."""
    x, (numbers, constants) = x.contiguous(), arguments_of(kind, x.dtype)
    rows, columns = x.shape[0], x.shape[1] // (2 if kind.gated else 1)
    y = x.new_empty(rows, columns)
    if y.numel():
        block_r, block_c = tile_of_activations(columns)
        probabilities = None if probabilities is None else probabilities.contiguous()
        activation_fwd_kernel[(triton.cdiv(rows, block_r) * triton.cdiv(columns, block_c),)](
            x, probabilities, y, rows, *numbers, F=columns, **constants, BLOCK_R=block_r, BLOCK_C=block_c
        )
    return y


def activation_bwd(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, kind: ActivationKind, needs_probabilities: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the probabilities ([T] float32; empty unless asked for)."""
    dy, x, (numbers, constants) = dy.contiguous(), x.contiguous(), arguments_of(kind, x.dtype)
    rows, columns = dy.shape
    dx = torch.empty_like(x)
    block_r, block_c = tile_of_activations(columns) if columns else (1, 1)
    across = triton.cdiv(columns, block_c)
    # Each program sums its own columns; adding up the few parts of a row afterwards keeps their order.
    parts = dy.new_empty(rows, across, dtype=torch.float32) if needs_probabilities else None
    if dy.numel():
        probabilities = None if probabilities is None else probabilities.contiguous()
        tile = {"F": columns, "BLOCK_R": block_r, "BLOCK_C": block_c}
        activation_bwd_kernel[(triton.cdiv(rows, block_r) * across,)](
            dy, x, probabilities, dx, parts, rows, *numbers, **constants, **tile
        )
    return dx, dy.new_empty(0, dtype=torch.float32) if parts is None else parts.sum(dim=1)
