"""A vocabulary that is split over the ranks of a group: lookup, logits, and a cross entropy for which no logits move.

Each rank holds consecutive rows of the embedding and of the output weight. The loss needs one all-gather of three
numbers per token (arXiv 1909.08053, section 3); `te_models.kernels.cross_entropy.shards` states its mathematics.
T tokens, H hidden, V words of the vocabulary, v words of this rank.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_models.kernels.asserted import asserted, host_reads
from te_models.kernels.cross_entropy import (
    CHUNK_TOKENS,
    IGNORE_INDEX,
    combined_loss,
    label_log_prob_gradients,
    label_statistics,
    shard_gradient,
    shard_statistics,
)
from te_models.kernels.cross_entropy.chunked import loss_and_gradients
from te_models.kernels.cross_entropy.op import scalar_tensor, scaled_in_float32
from te_models.kernels.cross_entropy.reference import valid_count
from te_models.kernels.cross_entropy.shards import shard_rows_per_step
from te_models.kernels.embedding import embedding
from te_models.kernels.torch_versions import own_result

from ..collectives import all_gather


def vocab_range(words: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first word, word behind the last one) of a rank: consecutive ranks have consecutive words, and the first
    V % ranks of them one more than the others."""
    each, more = divmod(words, ranks)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


class VocabShard(NamedTuple):
    """Which part of the vocabulary a rank holds. group: the name of the process group. words: of the whole vocabulary,
    shared as `vocab_range` says; None: each rank has as many as this one. One rank needs no group."""

    rank: int = 0
    ranks: int = 1
    group: str = ""
    words: int | None = None

    def place(self, own: int) -> tuple[int, int]:
        """Return (this rank's first word, words of the whole vocabulary); own: words of this rank."""
        if self.words is None:
            return self.rank * own, self.ranks * own
        return vocab_range(self.words, self.rank, self.ranks)[0], self.words


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, shard: VocabShard, *, label_smoothing: float = 0.0, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the loss of each token, the same on every rank, float32 (float64 of such logits) in labels' shape; 0
    where it does not count.

    logits: [..., v], this rank's words; labels: [...] integer, words of the whole vocabulary, or ignore_index.
    Differentiable once in the logits: the loss depends on all ranks' logits, and each rank gets the gradient of its
    logits as if it had the whole loss. Collective. ValueError for shapes that do not fit and, eagerly on a CPU, for a
    label that is no word; elsewhere its loss is NaN.
    """
    if logits.shape[:-1] != labels.shape:
        allowed = tuple(logits.shape[:-1])
        raise ValueError(f"target has shape {tuple(labels.shape)}; allowed with these logits: {allowed}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; allowed: a number from 0 to 1")
    first, words = shard.place(logits.shape[-1])
    flat = labels.reshape(-1).to(torch.int64)
    flat = torch.where(flat == ignore_index, IGNORE_INDEX, flat)
    _check_words(flat, words, ignore_index)
    loss = _VocabParallelLoss.apply(logits.reshape(-1, logits.shape[-1]), flat, shard, first, words, label_smoothing)
    return loss.view(labels.shape)


def _readable(x: Tensor) -> bool:
    """Whether the values of a tensor can be looked at without waiting for a device, and there are any."""
    return type(x) is Tensor and host_reads(x)


def _check_words(labels: Tensor, words: int, ignore_index: int) -> None:
    if not _readable(labels):
        return
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= words))]
    if wrong.numel():
        raise ValueError(f"target has {wrong[0].item()}; allowed: 0 to {words - 1}, or ignore_idx, {ignore_index}")


def _gathered(statistics: Tensor, shard: VocabShard) -> Tensor:
    """Return the statistics [3 or 4, T] of all ranks, [ranks, 3 or 4, T]."""
    count = statistics.shape[0]
    return (all_gather(statistics, shard.group) if shard.ranks > 1 else statistics).view(shard.ranks, count, -1)


class _VocabParallelLoss(torch.autograd.Function):
    """Losses [T] of logits [T, v] and labels [T]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard, first: int, words: int, smoothing: float
    ) -> Tensor:
        statistics = shard_statistics(logits, labels, first, smoothing)
        loss, normalizer = combined_loss(_gathered(statistics, shard), labels, words, smoothing)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.first, ctx.words, ctx.smoothing = first, words, smoothing
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels, normalizer = ctx.saved_tensors
        dx = shard_gradient(logits, labels, ctx.first, normalizer, grads[0], ctx.words, ctx.smoothing)
        return dx, None, None, None, None, None


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    bias: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
    z_loss_coeff: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of all words' logits plus z_loss_coeff times the z-loss, the mean of logsumexp^2 of
    them (0 without the coefficient), and the z-loss alone, without a gradient: scalars of float32 (float64 of such
    hidden states), the same on every rank; 0 if no label is valid.

    hidden: [T, H], the same on every rank; weight: [v, H]; bias: [v]; labels: [T] int64, words of the whole vocabulary,
    -100 where a token does not count; other arguments as for `te_models.kernels.cross_entropy.linear_cross_entropy`.
    Gradients are computed with the loss, so that only logits [chunk_tokens, v] ever exist, of T tokens where
    chunk_tokens is None. The gradient of hidden is this rank's part of a sum over the ranks. Collective. Raises
    ValueError where chunk_tokens is below 1 and, eagerly on a CPU, for a label that is no word.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; allowed: 1 or more, or None for all at once")
    _check_words(labels, shard.place(weight.shape[0])[1], IGNORE_INDEX)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    chunk = max(1, hidden.shape[0]) if chunk_tokens is None else chunk_tokens
    scaling = multiplier, softcap, z_loss_coeff
    loss, z_loss = _LinearLoss.apply(hidden, weight, bias, main_grad, labels, shard, *scaling, chunk, wanted)
    return loss, z_loss.detach()


class _LinearLoss(torch.autograd.Function):
    """The mean loss, and the `wanted` gradients; the weight's is added to main_grad where that is given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        labels: Tensor,
        shard: VocabShard,
        multiplier: float,
        softcap: float | None,
        z_loss_coeff: float,
        chunk: int,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor]:
        squares: list[Tensor] = []
        of_shard = partial(
            _loss_and_gradient_,
            shard=shard,
            multiplier=multiplier,
            softcap=softcap,
            z_loss_coeff=z_loss_coeff,
            squares=squares,
        )
        loss, *gradients = loss_and_gradients(
            hidden, weight, labels, bias, None, None, chunk, wanted, main_grad is not None, of_shard
        )
        ctx.save_for_backward(*gradients)
        ctx.main_grad, ctx.wanted = main_grad, wanted
        z_loss = torch.cat(squares).sum() / valid_count(labels) if squares else torch.zeros_like(loss)
        return loss, z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, _ = grads
        hidden, weight, bias = ctx.saved_tensors
        dx, dw, db = ctx.wanted
        of_weight = None
        if dw and ctx.main_grad is not None:
            ctx.main_grad.addcmul_(weight, grad)
        elif dw:
            of_weight = scaled_in_float32(weight, grad)
        return (
            scaled_in_float32(hidden, grad) if dx else None,
            of_weight,
            scaled_in_float32(bias, grad) if db else None,
            *(None,) * 8,
        )


def _loss_and_gradient_(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    _multiplier: None,
    _softcap: None,
    *,
    shard: VocabShard,
    multiplier: float,
    softcap: float | None,
    z_loss_coeff: float,
    squares: list[Tensor],
) -> Tensor:
    """Return each token's loss [T]; overwrite the projection's output [T, v] by its gradient, unless scale is None.
    squares: where logsumexp^2 of the tokens that count is appended, if it is a part of the loss."""
    first, words = shard.place(logits.shape[1])
    final = logits if multiplier == 1.0 else logits * multiplier
    final = final if softcap is None else softcap * torch.tanh(final / softcap)
    loss, normalizer = combined_loss(_gathered(shard_statistics(final, labels, first), shard), labels, words)
    counted = torch.where(labels != IGNORE_INDEX, normalizer, 0.0) if z_loss_coeff else None
    if counted is not None:
        squares.append(counted.square())
        loss = loss + z_loss_coeff * squares[-1]
    if scale is None:
        return loss
    for step in shard_rows_per_step(logits):
        z = final[step]
        of_loss = scale.expand(z.shape[0])
        gradient = shard_gradient(z, labels[step], first, normalizer[step], of_loss, words)
        if counted is not None:  # the gradient of logsumexp is the cross entropy's where no word is the label
            of_square = 2 * z_loss_coeff * scale * counted[step]
            no_word = torch.full_like(labels[step], words)
            gradient = gradient + shard_gradient(z, no_word, first, normalizer[step], of_square, words)
        if softcap is not None:
            gradient = gradient * (1 - (z / softcap).square())
        logits[step] = gradient if multiplier == 1.0 else gradient * multiplier
    return loss


def vocab_parallel_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard | None = None,
    bias: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the log-probability of each label among all words, float32 [T] (float64 of such hidden states), the same
    on every rank; 0 where a label is -100.

    Arguments as for `vocab_parallel_linear_cross_entropy`; shard: None for a rank that has all words. Of the logits a
    block of `chunk_tokens` tokens (None: 1024) and 32,768 words exists at a time, and is computed again in the backward
    pass. The gradient of hidden is this rank's part of a sum over the ranks. Differentiable once. Collective. Raises
    ValueError where chunk_tokens is below 1 and, eagerly on a CPU, for a label that is no word.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; allowed: 1 or more, or None for {CHUNK_TOKENS}")
    shard = VocabShard() if shard is None else shard
    _check_words(labels, shard.place(weight.shape[0])[1], IGNORE_INDEX)
    factor = None if statically_known_true(multiplier == 1.0) else scalar_tensor(multiplier, hidden)
    cap = None if softcap is None else scalar_tensor(softcap, hidden)
    chunk = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _LinearLogProbs.apply(hidden, weight, bias, labels, shard, factor, cap, chunk)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities [T] of labels [T]; see `vocab_parallel_linear_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shard: VocabShard,
        factor: Tensor | None,
        cap: Tensor | None,
        chunk: int,
    ) -> Tensor:
        first, words = shard.place(weight.shape[0])
        statistics = label_statistics(hidden, weight, bias, labels, factor, cap, first, chunk)
        loss, normalizer = combined_loss(_gathered(statistics, shard), labels, words)
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, factor, cap)
        ctx.first, ctx.chunk = first, chunk
        return -loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, labels, normalizer, factor, cap = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = label_log_prob_gradients(
            hidden, weight, bias, labels, normalizer, grads[0].contiguous(), factor, cap, ctx.first, ctx.chunk, wanted
        )
        return *(g if w else None for g, w in zip(found, wanted, strict=True)), *(None,) * 5


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, shard: VocabShard, main_grad: Tensor | None = None, padding_idx: int | None = None
) -> Tensor:
    """Return this rank's summand of the rows of all words' table, zeros for a word of another rank: ids [...] int64,
    weight [v, H] -> [..., H]. padding_idx: a word whose row gets no gradient.

    Raises IndexError for an id that is no word, eagerly on a CPU; elsewhere RuntimeError.
    """
    first, words = shard.place(weight.shape[0])
    known = ((ids >= 0) & (ids < words)).all()
    message = f"a token id is outside of its table of {words} rows"
    if not _readable(ids):
        asserted(known, message)
    elif not known:
        raise IndexError(message)
    local = ids - first
    here = (local >= 0) & (local < weight.shape[0])
    padding = None if padding_idx is None else padding_idx - first
    rows = embedding(torch.where(here, local, 0), weight, main_grad, padding)
    return torch.where(here[..., None], rows, 0)


def gather_logits(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return the logits of all words, [..., V] of [..., v], on every rank; if all ranks compute the same with them,
    each has the gradient of its logits."""
    return _AllLogits.apply(logits, shard)


class _AllLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard) -> Tensor:
        ctx.first, words = shard.place(logits.shape[-1])
        ctx.own = logits.shape[-1]
        most = -(-words // shard.ranks)  # ranks have equally many, or one fewer, and send equally many
        sent = F.pad(logits, (0, most - ctx.own)).movedim(-1, 0)
        received = all_gather(sent, shard.group).unflatten(0, (shard.ranks, most))
        each = [vocab_range(words, rank, shard.ranks) for rank in range(shard.ranks)]
        parts = [part[: end - first] for part, (first, end) in zip(received, each, strict=True)]
        return own_result(torch.cat(parts).movedim(0, -1).contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.first, ctx.own), None
