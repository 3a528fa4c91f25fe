"""Forward Kullback-Leibler divergence of two output layers, without logits of all tokens: what distillation minimises.

T tokens, V words; H and G hidden sizes of student and teacher. Of a token, with logits s and t divided by the
temperature, KL = sum_v p_t(v) (log p_t(v) - log p_s(v)). Both passes go over blocks of tokens and words as
`log_probs` does, with sums over blocks that are rescaled to the largest logit so far; the backward pass computes
the blocks again. Only the student has gradients.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..chunks import wide
from ..custom_op import Output, like, operation, register_gradient
from . import log_probs
from .log_probs import block_of_logits, spans
from .op import scalar_tensor


def _divergence(hidden: Tensor) -> tuple[Output, Output]:
    dtype = wide(hidden)
    return like(hidden, (hidden.shape[0],), dtype), like(hidden, (2, hidden.shape[0]), dtype)


@operation("linear_kl", _divergence)
def linear_kl_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    factors: Tensor,
    softcap: Tensor | None,
    teacher_softcap: Tensor | None,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return each token's KL, float32 [T] (float64 of such hidden states), and the logsumexp of the student's and the
    teacher's logits [2, T].

    hidden: [T, H]; weight: [V, H]; teacher_hidden: [T, G]; teacher_weight: [V, G]; biases: [V]. factors: [3], the
    multipliers of student and teacher, and the temperature. softcaps: scalars, as factors in the dtype of the
    KL. Differentiable once in hidden, weight and bias.
    """
    dtype = wide(hidden)
    found, normalizers = (hidden.new_empty((*size, hidden.shape[0]), dtype=dtype) for size in ((), (2,)))
    for rows in spans(hidden.shape[0], chunk_tokens):
        total = hidden.new_full((2, len(hidden[rows])), -torch.inf, dtype=found.dtype)
        cross = torch.zeros_like(total[0])
        for columns in spans(weight.shape[0], log_probs.CHUNK_WORDS):
            s, _ = block_of_logits(hidden[rows], weight[columns], bias, columns, factors[0], softcap)
            t, _ = block_of_logits(
                teacher_hidden[rows], teacher_weight[columns], teacher_bias, columns, factors[1], teacher_softcap
            )
            s, t = s / factors[2], t / factors[2]
            before = total
            total = torch.logaddexp(total, torch.stack([torch.logsumexp(s, -1), torch.logsumexp(t, -1)]))
            share = (t - total[1, :, None]).exp()
            cross = cross * (before[1] - total[1]).exp() + (share * (t - s)).sum(-1)
        found[rows], normalizers[:, rows] = cross - total[1] + total[0], total
    return found, normalizers


@operation("linear_kl_bwd", log_probs.gradient_outputs)
def linear_kl_bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    factors: Tensor,
    softcap: Tensor | None,
    teacher_softcap: Tensor | None,
    chunk_tokens: int,
    wanted: list[bool],
    normalizers: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in hidden, weight and bias that are `wanted` (the others empty) of the sum of grad [T] times
    the KL; other arguments as for `linear_kl_fwd`."""
    words, found = weight.shape[0], log_probs.BlockGradients(hidden, weight, bias, wanted, normalizers.dtype)
    for rows in spans(hidden.shape[0], chunk_tokens):
        x, scale = hidden[rows], grad[rows, None] * factors[0] / factors[2]
        for columns in spans(words, log_probs.CHUNK_WORDS):
            s, slope = block_of_logits(x, weight[columns], bias, columns, factors[0], softcap)
            t, _ = block_of_logits(
                teacher_hidden[rows], teacher_weight[columns], teacher_bias, columns, factors[1], teacher_softcap
            )
            gradient = (s / factors[2] - normalizers[0, rows, None]).exp_()
            gradient -= (t / factors[2] - normalizers[1, rows, None]).exp_()
            gradient = (gradient if slope is None else gradient * slope).mul_(scale)
            found.add(rows, columns, gradient)
    return found.results()


_SAVED = (
    "hidden",
    "weight",
    "bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "factors",
    "softcap",
    "teacher_softcap",
    "chunk_tokens",
)


@register_gradient(linear_kl_fwd, saves=_SAVED, saves_results=(1,), constant=(1,))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    names = _SAVED[:3]
    wanted = [name in needs for name in names]
    arguments = (getattr(saved, name) for name in _SAVED)
    found = linear_kl_bwd(*arguments, wanted, *saved.results, grad.contiguous())
    return {name: gradient for name, gradient, asked in zip(names, found, wanted, strict=True) if asked}


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    *,
    temperature: float = 1.0,
    multipliers: tuple[float, float] = (1.0, 1.0),
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the divergence of the student's distribution of each next token from the teacher's, float32 [T] (float64
    of such hidden states): KL(teacher || student) of logits divided by the temperature.

    hidden: [T, H]; weight: [V, H]; teacher_hidden: [T, G]; teacher_weight: [V, G]; biases: [V] or None; of one dtype in
    a model. multipliers, softcaps: of the logits of student and teacher, as in `output_logits`. chunk_tokens: tokens
    whose logits exist at a time (None: 1024). Differentiable once in hidden, weight and bias.
    """
    factors = torch.stack([scalar_tensor(x, hidden) for x in (*multipliers, temperature)])
    caps = [None if cap is None else scalar_tensor(cap, hidden) for cap in softcaps]
    own = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
    chunk = log_probs.CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return linear_kl_fwd(*own, factors, *caps, chunk)[0]
