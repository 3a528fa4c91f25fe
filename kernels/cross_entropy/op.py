"""Public cross entropy; `linear_cross_entropy` never holds float32 logits of all tokens, or no logits of all tokens.

On CPU and without `chunk_tokens`, [T, V] exists once, in the compute dtype. Compiled, the reference has that property:
Inductor fuses the float32 softmax into the loss and its gradient into the logits' own buffer. Eager PyTorch would hold
four such tensors, three of them float32; there softmax and gradient are computed a few rows at a time, the gradient
written over the logits. Both leave the two gradient GEMMs whole. Measured (T 1024, H 576, V 16384, bf16, one thread;
the three GEMMs alone 158 ms): compiled 181 ms, eager 241 ms against 342 ms for plain eager.

With `chunk_tokens`, and always on an accelerator, one registered op computes the gradients in the forward: logits of
a chunk exist for a moment, at the price of a pass over [V, H] per chunk and one more to scale (+6 to +25 % on CPU).
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..backend import definitions_only
from ..chunks import wide
from ..compiling import compiling
from ..custom_op import FLOATS, INTEGERS, Output, absent, like, operation, register_gradient, takes
from . import reference, rows
from .reference import IGNORE_INDEX, output_logits


def _losses(logits: Tensor) -> tuple[Output, Output]:
    per_token = like(logits, logits.shape[:1], torch.float32)
    return per_token, per_token


_LOSSES = takes(f"logits: {FLOATS} [S, V]; labels: {INTEGERS} [S]")


@operation("cross_entropy_fwd", _losses, takes=_LOSSES)
def cross_entropy_fwd(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's loss and logsumexp, float32 [T]. logits: [T, V]; labels: [T], -100 costs nothing.

    Runs in Triton. Differentiable once in logits; a label that is no column gives NaN.
    """
    from . import triton

    return triton.cross_entropy_fwd(logits, labels)


_GRADIENTS_TAKE = takes(f"logits: {FLOATS} [S, V]; labels: {INTEGERS} [S]; normalizer: float32 [S]; scale: float32 [S]")


@operation("cross_entropy_bwd", lambda logits: like(logits), takes=_GRADIENTS_TAKE)
def cross_entropy_bwd(logits: Tensor, labels: Tensor, normalizer: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient in logits [T, V] of the sum of scale [T] times `cross_entropy_fwd`'s losses."""
    from . import triton

    return triton.cross_entropy_bwd(logits, labels, normalizer, scale)


@register_gradient(cross_entropy_fwd, saves=("logits", "labels"), saves_results=(1,), constant=(1,))
def _backward_fwd(saved: SimpleNamespace, needs: set[str], scale: Tensor) -> dict[str, Tensor]:
    return {"logits": cross_entropy_bwd(saved.logits, saved.labels, *saved.results, scale)}


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], weight_grad_in_fp32: bool
) -> tuple[Output, ...]:
    weight_dtype = torch.promote_types(weight.dtype, torch.float32) if weight_grad_in_fp32 else weight.dtype
    return like(hidden, (), wide(hidden)), *output_gradients(hidden, weight, bias, wanted, weight_dtype)


def output_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], weight_dtype: torch.dtype | None = None
) -> tuple[Output, Output, Output]:
    """Describe the gradients in hidden, weight and bias of an output layer; those that are not wanted are empty.
    weight_dtype: the dtype of the weight's; None: the weight's own."""
    weight_dtype = weight_dtype or weight.dtype
    bias_dtype = torch.float32 if bias is None else bias.dtype
    return (
        like(hidden) if wanted[0] else absent(hidden),
        like(weight, dtype=weight_dtype) if wanted[1] else absent(weight, weight_dtype),
        like(weight, weight.shape[:1], bias_dtype) if wanted[2] else absent(weight, bias_dtype),
    )


@operation("linear_cross_entropy", _loss_and_gradients)
def linear_cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    softcap: Tensor | None,
    chunk_tokens: int,
    wanted: list[bool],
    weight_grad_in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean loss and the gradients of hidden, weight and bias that are `wanted` (the others empty), each in
    the dtype of its tensor, but for the weight's gradient where it is asked for in float32.

    multiplier, softcap: scalars in `wide` on hidden's device. Numbers would be constants of the compiled graph:
    under dynamic=True the compiler first makes a variable of a float, and compiles again when an op asks for its value.
    """
    from .chunked import loss_and_gradients

    return loss_and_gradients(
        hidden, weight, labels, bias, multiplier, softcap, chunk_tokens, wanted, weight_grad_in_fp32
    )


@operation("scaled", lambda x: like(x), takes=takes("x: any; factor: float32|float64; factor.numel() == 1"))
def scaled_in_float32(x: Tensor, factor: Tensor) -> Tensor:
    """Return `x * factor` in x's dtype, the scalar `factor` of float32 (float64 of such x) unrounded: a device would
    round it to x's."""
    if x.device.type == "cpu" or x.dtype == torch.float64:
        return x * factor
    from . import triton

    return triton.scaled_in_float32(x, factor)


@register_gradient(linear_cross_entropy_op, saves=("wanted",), saves_results=(1, 2, 3), constant=(1, 2, 3))
def _backward_linear(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    names = ("hidden", "weight", "bias")
    return {n: scaled_in_float32(g, grad) for n, g, w in zip(names, saved.results, saved.wanted, strict=True) if w}


class _AccumulatingLoss(torch.autograd.Function):
    """`linear_cross_entropy_op` whose backward pass adds the weight's gradient to main_grad."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor, labels: Tensor, *rest: Any
    ) -> Tensor:
        loss, *gradients = linear_cross_entropy_op(hidden, weight, labels, bias, *rest, True)
        ctx.save_for_backward(*gradients)
        ctx.main_grad, ctx.wanted = main_grad, rest[-1]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        hidden, weight, bias = ctx.saved_tensors
        if ctx.wanted[1]:
            ctx.main_grad.addcmul_(weight, grad)
        dx = scaled_in_float32(hidden, grad) if ctx.wanted[0] else None
        return dx, None, scaled_in_float32(bias, grad) if ctx.wanted[2] else None, *(None,) * 6


class _WholeLoss(torch.autograd.Function):
    """Sum of token losses of [T, V] logits, and its gradient, by a few rows at a time. The backward overwrites them."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        normalizer = torch.empty(logits.shape[0], dtype=wide(logits), device=logits.device)
        for step in rows.rows_per_step(logits):
            torch.logsumexp(logits[step].to(normalizer.dtype), dim=-1, out=normalizer[step])
        target = logits.gather(1, rows.label_columns(labels))[:, 0].to(normalizer.dtype)
        ctx.save_for_backward(labels, normalizer)
        ctx.logits = logits
        return torch.where(labels != IGNORE_INDEX, normalizer - target, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        labels, normalizer = ctx.saved_tensors
        if ctx.logits is None:
            raise RuntimeError("the loss was differentiated twice; its logits were overwritten by the first backward")
        logits, ctx.logits = ctx.logits, None
        scale = torch.where(labels != IGNORE_INDEX, grad, 0.0)[:, None]
        one_hot = rows.label_columns(labels)
        minus_one = torch.full_like(one_hot, -1, dtype=normalizer.dtype)
        for step in rows.rows_per_step(logits):
            probabilities = logits[step].to(normalizer.dtype).sub_(normalizer[step, None]).exp_()
            logits[step] = probabilities.scatter_add_(1, one_hot[step], minus_one[step]).mul_(scale[step])
        return logits, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over valid tokens of `logsumexp(logits) - logits[label]`, a float32 scalar (float64 of such
    logits); 0 if none is valid.

    logits: [T, V]; labels: [T] int64, -100 where a token does not count.
    """
    if logits.device.type == "cuda" and not definitions_only() and not _LOSSES.misfit(logits, labels):
        return cross_entropy_fwd(logits, labels)[0].sum() / reference.valid_count(labels)
    return reference.cross_entropy(logits, labels)


def scalar_tensor(value: float, like: Tensor) -> Tensor:
    """Return a scalar of a number in `wide` of `like`, on its device."""
    # By a product: torch.full would ask for the value of what is a variable of the graph under dynamic=True.
    return torch.ones((), dtype=wide(like), device=like.device) * value


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return the mean cross entropy of the output layer's logits, a float32 scalar (float64 of such hidden
    states); 0 if no label is valid.

    hidden: [T, H]; weight: [V, H]; labels: [T] int64, ignore_index where a token does not count; bias: [V]; multiplier
    and softcap as in `output_logits`. chunk_tokens: hold the logits of this many tokens at a time, never of all, and
    compute gradients in the forward. None: of all tokens at once, faster if memory allows. Differentiable
    once in hidden, weight and bias. main_grad: [V, H] float32, to which the weight's gradient is added, unrounded,
    while autograd gets none. Raises ValueError where chunk_tokens is below 1.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; allowed: 1 or more, or None for all at once")
    if ignore_index != IGNORE_INDEX:
        labels = torch.where(labels == ignore_index, IGNORE_INDEX, labels)
    if chunk_tokens is not None or hidden.device.type == "cuda":
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        chunk = torch.sym_max(1, hidden.shape[0]) if chunk_tokens is None else chunk_tokens
        factor = None if statically_known_true(multiplier == 1.0) else scalar_tensor(multiplier, hidden)
        cap = None if softcap is None else scalar_tensor(softcap, hidden)
        if main_grad is not None:
            return _AccumulatingLoss.apply(hidden, weight, bias, main_grad, labels, factor, cap, chunk, wanted)
        return linear_cross_entropy_op(hidden, weight, labels, bias, factor, cap, chunk, wanted)[0]
    options: dict[str, Any] = {"multiplier": multiplier, "softcap": softcap, "main_grad": main_grad}
    if torch.compiler.is_compiling() and compiling():
        return reference.linear_cross_entropy(hidden, weight, labels, bias, **options)
    logits = output_logits(hidden, weight, bias, **options)
    return _WholeLoss.apply(logits, labels) / reference.valid_count(labels)
