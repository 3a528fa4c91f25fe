"""Cross entropy kernels. One program owns one token; the softmax is float32 in registers, whatever the logits are.

T tokens, V vocabulary. `cross_entropy_grad_kernel` reads a row twice and writes it once: the second reading comes from
the second-level cache, since few rows are in flight, so memory sees one reading and one writing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import IGNORE_INDEX

_IGNORE: tl.constexpr = tl.constexpr(IGNORE_INDEX)


@triton.jit
def tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def final_logits(z, multiplier_ptr, softcap_ptr):
    """What the softmax sees of the projection's float32 output."""
    if multiplier_ptr is not None:
        z *= tl.load(multiplier_ptr)
    if softcap_ptr is not None:
        softcap = tl.load(softcap_ptr)
        z = tanh(z / softcap) * softcap
    return z


@triton.jit
def log_normalizer(row_ptr, multiplier_ptr, softcap_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """logsumexp of one row, in one pass: the sum so far is rescaled whenever the maximum grows. NaN stays."""
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)
        z = tl.where(columns < V, final_logits(z, multiplier_ptr, softcap_ptr), float("-inf"))
        new = tl.maximum(largest, tl.max(z, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(z - shift), axis=0)
        largest = new
    return largest + tl.log(total)


@triton.jit
def token_loss(row_ptr, label, normalizer, multiplier_ptr, softcap_ptr, V: tl.constexpr):
    """The loss of one token: 0 if it is ignored, NaN if its label is no column."""
    known = (label >= 0) & (label < V)
    target = tl.load(row_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    return tl.where(label == _IGNORE, 0.0, normalizer - final_logits(target, multiplier_ptr, softcap_ptr))


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr,
    label_ptr,
    loss_ptr,
    normalizer_ptr,
    multiplier_ptr,
    softcap_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * V
    normalizer = log_normalizer(row_ptr, multiplier_ptr, softcap_ptr, V, BLOCK)
    label = tl.load(label_ptr + token)
    tl.store(loss_ptr + token, token_loss(row_ptr, label, normalizer, multiplier_ptr, softcap_ptr, V))
    if normalizer_ptr is not None:
        tl.store(normalizer_ptr + token, normalizer)


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr, label_ptr, normalizer_ptr, scale_ptr, grad_ptr, V: tl.constexpr, BLOCK: tl.constexpr
):
    program, across = tl.program_id(0), tl.cdiv(V, BLOCK)
    token = (program // across).to(tl.int64)
    columns = (program % across) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + token)
    normalizer, scale = tl.load(normalizer_ptr + token), tl.load(scale_ptr + token)
    z = tl.load(logits_ptr + token * V + columns, mask=columns < V, other=0.0).to(tl.float32)
    grad = (tl.exp(z - normalizer) - tl.where(columns == label, 1.0, 0.0)) * scale
    grad = tl.where(label == _IGNORE, 0.0, grad)
    tl.store(grad_ptr + token * V + columns, grad.to(grad_ptr.dtype.element_ty), mask=columns < V)


@triton.jit
def cross_entropy_grad_kernel(
    logits_ptr,
    label_ptr,
    scale_ptr,
    loss_ptr,
    multiplier_ptr,
    softcap_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * V
    normalizer = log_normalizer(row_ptr, multiplier_ptr, softcap_ptr, V, BLOCK)
    label, scale = tl.load(label_ptr + token), tl.load(scale_ptr)
    tl.store(loss_ptr + token, token_loss(row_ptr, label, normalizer, multiplier_ptr, softcap_ptr, V))
    if multiplier_ptr is not None:
        scale *= tl.load(multiplier_ptr)
    # Every thread has read the label's logit before any thread overwrites it.
    tl.debug_barrier()
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)
        z = final_logits(z, multiplier_ptr, softcap_ptr)
        grad = (tl.exp(z - normalizer) - tl.where(columns == label, 1.0, 0.0)) * scale
        if softcap_ptr is not None:
            capped = z / tl.load(softcap_ptr)
            grad *= 1.0 - capped * capped
        grad = tl.where(label == _IGNORE, 0.0, grad)
        tl.store(row_ptr + columns, grad.to(logits_ptr.dtype.element_ty), mask=columns < V)


@triton.jit
def scaled_kernel(x_ptr, factor_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * tl.load(factor_ptr)).to(y_ptr.dtype.element_ty), mask=at < n)


def _options(columns: int) -> dict[str, int]:
    block = min(8192, triton.next_power_of_2(columns))
    return {"V": columns, "BLOCK": block, "num_warps": max(4, block // 512)}


def cross_entropy_fwd(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's loss and logsumexp, float32 [T], of logits [T, V]."""
    loss, normalizer = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    if logits.shape[0]:
        cross_entropy_fwd_kernel[(logits.shape[0],)](
            logits.contiguous(),
            labels.contiguous(),
            loss,
            normalizer,
            None,
            None,
            **_options(logits.shape[1]),
        )
    return loss, normalizer


def cross_entropy_bwd(logits: Tensor, labels: Tensor, normalizer: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient in logits [T, V] of the sum of scale [T] times the tokens' losses."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if grad.numel():
        block = min(4096, triton.next_power_of_2(logits.shape[1]))
        cross_entropy_bwd_kernel[(logits.shape[0] * triton.cdiv(logits.shape[1], block),)](
            logits.contiguous(),
            labels.contiguous(),
            normalizer,
            scale.contiguous(),
            grad,
            V=logits.shape[1],
            BLOCK=block,
        )
    return grad


def cross_entropy_grad_(
    logits: Tensor, labels: Tensor, scale: Tensor | None, multiplier: Tensor | None, softcap: Tensor | None
) -> Tensor:
    """Return each token's loss, float32 [T]; overwrite logits [T, V], as the projection made them, by their gradient.

    scale: float32 scalar, what the gradient of each loss is; None: logits are left alone. multiplier, softcap: float32
    scalars or None.
    """
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    if logits.shape[0]:
        assert logits.is_contiguous(), "logits are overwritten"
        kernel, buffers = cross_entropy_grad_kernel, (scale, loss)
        if scale is None:
            kernel, buffers = cross_entropy_fwd_kernel, (loss, None)
        options = _options(logits.shape[1])
        kernel[(logits.shape[0],)](logits, labels.contiguous(), *buffers, multiplier, softcap, **options)
    return loss


def scaled_in_float32(x: Tensor, factor: Tensor) -> Tensor:
    """Return `x * factor`, factor a float32 scalar, rounded once to x's dtype."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        scaled_kernel[(triton.cdiv(y.numel(), 2048),)](x.contiguous(), factor, y, y.numel(), BLOCK=2048)
    return y
