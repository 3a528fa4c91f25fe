"""Softmax attention without a mask on a CPU, as differentiable operations of eager code and of a graph.

torch's kernel computes all scores of a block of queries, half of which a causal mask hides up to 768 of them, converts
what it multiplies, and wants keys repeated for the heads that share them. This one computes what is seen, on
instructions that multiply pairs of bfloat16 where the CPU has them, and reads a key head once for all of its queries.
What it does not serve is torch's to compute.

B batch, S queries, L keys, N query heads, G key/value heads, D channels of q and k, Dv channels of v.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import libraries
from ..backend import PLAIN, Backend, choose
from ..compiling import compiling
from ..custom_op import Output, direct, entry_of, like, operation, register_gradient, takes
from .library import ATTENTION, BACKWARD, DTYPES, attention_backward, attention_forward

FEWEST = {torch.bfloat16: 64, torch.float32: 96}
"""The fewest queries by dtype: of fewer, what a call takes beside its products is longer than what these save."""
MOST_KEYS = 2**24
"""The most keys, whose numbers are exact in float32."""


_HEADS_FIRST = takes("q: T [B, N, S, D]; k: T [B, G, L, D]; v: T [B, G, L, V]", T=DTYPES)
_TAKES = takes("q: T [B, S, N, D]; k: T [B, L, G, D]; v: T [B, L, G, V]; causal: value; not causal or S <= L", T=DTYPES)
_GRADIENTS_TAKE = takes(
    "grad: T [B, S, N, V]; q: T [B, S, N, D]; k: T [B, L, G, D]; v: T [B, L, G, V]; out: T [B, S, N, V];"
    "logsumexp: float32 [B, S, N]; causal: value; not causal or S <= L",
    T=DTYPES,
)


def uses_flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether `flash_attention` attends from q: [B, N, S, D] to k: [B, G, L, D] and v: [B, G, L, Dv]: plain tensors of
    one dtype on CPU, in eager code or a graph."""
    if not fits(q, k, v, scale):
        return False
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != q.dtype:
        return False  # torch's attention is of another dtype there
    if libraries.supposed:  # accelerators have such a kernel, where torch's of a CPU would write all scores
        return True
    if any(type(x) not in PLAIN for x in (q, k, v)):
        return False
    gradients = _wants_gradients(q, k, v)
    chosen = choose(ATTENTION, q, q.dtype, BACKWARD) if gradients else choose(ATTENTION, q)
    if chosen is not Backend.COMPILED:
        return chosen is Backend.OPERATION
    if gradients and (q.is_inference() or k.is_inference() or v.is_inference()):
        return False  # which nothing may keep for a backward pass
    return not _HEADS_FIRST.misfit_on_cpu(q, k, v)


def fits(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the library is for tensors of this dtype, device and shape; where that is a variable of a graph, for any
    number of queries. Arguments: see `uses_flash_attention`."""
    if q.device.type != "cpu" or q.dim() != 4 or _HEADS_FIRST.misfit_of_fakes(q, k, v) or not scale > 0.0:
        return False
    (batch, heads, queries, channels), (of_keys, groups, keys, _), values = q.shape, k.shape, v.shape[3]
    conditions = (
        channels > 0,
        channels % 16 == 0,
        channels <= 256,
        values > 0,
        values % 16 == 0,
        values <= 256,
        k.shape[3] == channels,
        batch == of_keys,
        of_keys == v.shape[0],
        groups == v.shape[1],
        keys == v.shape[2],
        groups > 0 and heads % groups == 0,
    )
    if not torch.compiler.is_compiling():
        return all(conditions) and queries >= FEWEST[q.dtype] and keys < MOST_KEYS
    if not all(statically_known_true(condition) for condition in conditions):
        return False
    return not statically_known_true(queries < FEWEST[q.dtype]) and not statically_known_true(keys >= MOST_KEYS)


def _wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _results(q: Tensor, v: Tensor) -> tuple[Output, Output]:
    return like(q, (*q.shape[:-1], v.shape[-1])), like(q, q.shape[:-1], torch.float32)


@operation("flash_attention_fwd", _results, takes=_TAKES)
def flash_attention_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention [B, S, N, Dv] and the log of the sum of exponentials of each query's scores, float32 [B, S, N].

    q: [B, S, N, D]; k: [B, L, G, D]; v: [B, L, G, Dv]; causal: queries are of the last of the keys, and see none behind
    themselves. Differentiable in q, k and v.
    """
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if k.numel():
        attention_forward(q, k, v, out, logsumexp, scale=scale, causal=causal)
    else:
        out.zero_()
        logsumexp.fill_(float("-inf"))
    return out, logsumexp


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Output, Output, Output]:
    return like(q), like(k), like(v)


@operation("flash_attention_bwd", _gradients, takes=_GRADIENTS_TAKE)
def flash_attention_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `flash_attention_fwd`, from its results. grad: [B, S, N, Dv].

    Differentiable in grad, q, k and v, with all scores written out.
    """
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if k.numel() and q.numel():
        attention_backward(grad, q, k, v, out, logsumexp, into=(dq, dk, dv), scale=scale, causal=causal)
    else:
        for x in (dq, dk, dv):
            x.zero_()
    return dq, dk, dv


@register_gradient(flash_attention_fwd, saves=("q", "k", "v", "scale", "causal"), saves_results=(0, 1), constant=(1,))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    out, logsumexp = saved.results
    found = flash_attention_bwd(grad, saved.q, saved.k, saved.v, out, logsumexp, saved.scale, saved.causal)
    return dict(zip("qkv", found, strict=True))


@register_gradient(flash_attention_bwd, saves=("grad", "q", "k", "v", "scale", "causal"))
def _second(saved: SimpleNamespace, needs: set[str], *grads: Tensor) -> dict[str, Tensor | None]:
    """Of the definition of `flash_attention_fwd`, differentiated twice in float32."""
    names = ("grad", "q", "k", "v")
    with torch.enable_grad():
        inputs = [getattr(saved, name).detach().float().requires_grad_() for name in names]
        grad, q, k, v = inputs
        y = _explicit(q, k, v, saved.scale, saved.causal)
        first = torch.autograd.grad(y, (q, k, v), grad, create_graph=True)
        found = torch.autograd.grad(first, inputs, [g.float() for g in grads], allow_unused=True)
    return {name: None if x is None else x.to(getattr(saved, name).dtype) for name, x in zip(names, found, strict=True)}


def _explicit(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    shared = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)))
    scores = scale * q @ k.mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(later, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Return attention [B, N, S, Dv], a view of [B, S, N, Dv], where it `uses_flash_attention`. q: [B, N, S, D]; k: [B,
    G, L, D]; v: [B, G, L, Dv]; causal: of as many queries as keys, or of the last of these. Differentiable in q, k and
    v."""
    operands = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, causal)
    if libraries.supposed or (torch.compiler.is_compiling() and compiling()):
        out = flash_attention_fwd(*operands)[0]
    elif _wants_gradients(q, k, v):
        out = _FlashAttention.apply(*operands)
    else:
        out = _run(*operands)[0]
    return out.transpose(1, 2)


_run = entry_of(
    flash_attention_fwd
).implementation  # of eager code, where `uses_flash_attention` has asked all that the dispatcher would
_run_backward = direct(flash_attention_bwd)


class _FlashAttention(torch.autograd.Function):
    """The two operations in eager code, past torch's look-out for aliases, because that takes 200 us."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, logsumexp = _run(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.flags = (scale, causal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_run_backward(grad, *ctx.saved_tensors, *ctx.flags), None, None)
