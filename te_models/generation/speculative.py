"""Speculative decoding (Leviathan et al., arXiv 2211.17192): a draft proposes, the model checks in one call.

With q the draft's distribution of a token and p the model's, a proposed token x stays with probability
min(1, p(x) / q(x)); at the first that does not, the token is drawn from max(0, p - q) instead, and if all stay, the
model's call gives one more token. What comes out has the distribution p. At temperature 0 p and q are one token each:
the text is the model's own greedy text, up to sums that a call of several tokens rounds differently from one of one.

L tokens, K proposed tokens, V vocabulary, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from te_models.kernels.without_autocast import compute_dtype

from ..eval_mode import in_eval_mode
from ..model import GPTModel, KVCache
from .one_thread import short_steps
from .sampling import Sampler


class Draft(ABC):
    """What proposes tokens: a smaller model (`DraftModel`), or heads that predict further tokens of the model itself.

    needs_hidden_states: whether `propose` gets the model's hidden states. most: how many tokens it proposes at a
    time; None: any number. proposed, accepted: counts of tokens.
    """

    needs_hidden_states = False
    most: int | None = None
    proposed = 0
    accepted = 0

    @abstractmethod
    def begin(self, model: GPTModel, max_length: int) -> None:
        """Prepare for a text of up to max_length tokens of `model`. Raises ValueError for a model that it does not
        fit."""

    @abstractmethod
    def propose(
        self, tokens: Tensor, hidden_states: Tensor | None, count: int, sampler: Sampler
    ) -> tuple[Tensor, Tensor]:
        """Return `count` next tokens, [K] int64, and the distribution that each was drawn from, float32 [K, V].

        tokens: [1, L], prompt and text so far; later calls go on from it, or from a text that shares its beginning.
        hidden_states: [1, L - 1, H], of all but the last token, after the model's final norm; None unless
        `needs_hidden_states`. sampler: gives distributions, and draws.
        """

    @property
    def acceptance_rate(self) -> float:
        """The part of the proposed tokens that stayed; 0 before there are any."""
        return self.accepted / self.proposed if self.proposed else 0.0


class DraftModel(Draft):
    """A smaller model of the same vocabulary as a draft.

    Example:
        draft = DraftModel(small.eval())
        generate(model, input_ids, 100, draft_model=draft)
        print(draft.acceptance_rate)
    """

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self._cache: KVCache | None = None
        self._read = torch.empty(0, dtype=torch.int64, device="cpu")

    def begin(self, model: GPTModel, max_length: int) -> None:
        """As `Draft.begin`; the vocabularies must have the same size."""
        ours, theirs = self.model.config, model.config
        if ours.vocab_size != theirs.vocab_size:
            raise ValueError(f"the draft model has {ours.vocab_size} tokens; allowed: {theirs.vocab_size}, the model's")
        check_speculative(self.model, "draft model")
        weight = self.model.embedding.word_embeddings.weight
        # what it read may be taken back entirely: nothing in reach is dropped
        self._cache = KVCache(
            ours, 1, max_length, dtype=compute_dtype(weight), device=weight.device, rollback=max_length
        )
        self._read = torch.empty(0, dtype=torch.int64, device=weight.device)

    def propose(
        self, tokens: Tensor, hidden_states: Tensor | None, count: int, sampler: Sampler
    ) -> tuple[Tensor, Tensor]:
        """As `Draft.propose`."""
        assert self._cache is not None, "begin"
        same = min(shared_length(self._read, tokens[0]), tokens.shape[1] - 1)
        self._cache.crop(same)
        ids = tokens[:, self._cache.length :]
        chosen, distributions = [], []
        for _ in range(count):
            with short_steps(self.model, ids.numel()):
                logits = self.model(ids, cache=self._cache, last_logits_only=True).logits
            assert logits is not None
            distributions.append(sampler.probabilities(logits[:, -1]))
            chosen.append(sampler.draw(distributions[-1]))
            ids = chosen[-1][:, None]
        self._read = torch.cat((tokens[0], *chosen[:-1]))
        return torch.cat(chosen), torch.cat(distributions)


def shared_length(before: Tensor, text: Tensor) -> int:
    """Return how many tokens two texts, [M] and [L], begin with that are the same."""
    length = min(len(before), len(text))
    differ = (before[:length] != text[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


def check_speculative(model: GPTModel, name: str) -> None:
    """Raise ValueError for a model whose cache cannot be taken back token by token."""
    if model.decoder.by_length:
        raise ValueError(
            f"the {name} rotates by the length of the text (longrope, dynamic); allowed with a draft: other rotations"
        )


def speculative_steps(
    model: GPTModel,
    draft: Draft,
    ids: Tensor,
    max_new_tokens: int,
    num_draft_tokens: int,
    sampler: Sampler,
    ends: tuple[int, ...],
) -> Iterator[Tensor]:
    """Check the arguments now; return the iterator of tokens, [1] int64 each. ids: [1, S], without padding."""
    check_speculative(model, "model")
    room = ids.shape[1] + max_new_tokens
    draft.begin(model, room)

    def steps() -> Iterator[Tensor]:
        dtype = compute_dtype(model.embedding.word_embeddings.weight)
        # a recurrent model goes back to the states before a call, and the next call begins with them
        recurrent = model.config.is_recurrent
        rollback = 2 * num_draft_tokens + 1 if recurrent else num_draft_tokens
        cache = KVCache(model.config, 1, room, dtype=dtype, device=ids.device, rollback=rollback)
        tokens, hidden, new = ids, None, 0
        models = [model, *([draft.model] if isinstance(draft, DraftModel) else [])]
        with in_eval_mode(*models):
            while new < max_new_tokens:
                with torch.no_grad():
                    # the call itself gives one token, and before the prompt is read there are no hidden states
                    count = min(num_draft_tokens, max_new_tokens - new - 1)
                    count = count if draft.most is None else min(count, draft.most)
                    count = 0 if (draft.needs_hidden_states or recurrent) and not cache.length else count
                    proposed, guessed = ids[0, :0], None
                    if count:
                        proposed, guessed = draft.propose(tokens, hidden, count, sampler)
                    unread = torch.cat((tokens[:, cache.length :], proposed[None]), dim=1)
                    begin, read = cache.length, tokens.shape[1]
                    with short_steps(model, unread.numel()):
                        output = model(unread, cache=cache, return_hidden_states=draft.needs_hidden_states)
                    assert output.logits is not None
                    wanted = sampler.probabilities(output.logits[0, unread.shape[1] - count - 1 :])
                    accepted, last = _checked(proposed, guessed, wanted, sampler)
                    cache.crop(read + accepted)
                    if draft.needs_hidden_states:
                        states = output.hidden_states[-1][:, : unread.shape[1] - count + accepted]
                        hidden = states if hidden is None else torch.cat((hidden[:, :begin], states), dim=1)
                draft.proposed += count
                draft.accepted += accepted
                for token in torch.cat((proposed[:accepted], last)).split(1):
                    tokens, new = torch.cat((tokens, token[None]), dim=1), new + 1
                    yield token
                    if int(token) in ends:
                        return

    return steps()


def _checked(proposed: Tensor, guessed: Tensor | None, wanted: Tensor, sampler: Sampler) -> tuple[int, Tensor]:
    """Return how many proposed tokens [K] stay, and the token behind them, [1]. guessed: [K, V]; wanted: [K + 1, V]."""
    if guessed is not None:
        rows = torch.arange(len(proposed), device=proposed.device)
        p, q = wanted[rows, proposed], guessed[rows, proposed]
        stays = p > 0
        if sampler.temperature > 0:
            drawn = torch.rand(p.shape, generator=sampler.generator, dtype=torch.float32, device=p.device)
            stays = drawn * q < p
        accepted = int(stays.long().cumprod(dim=0).sum())
        if accepted < len(proposed):
            rest = (wanted[accepted] - guessed[accepted]).clamp(min=0)
            rest = torch.where(rest.sum() > 0, rest, wanted[accepted])  # p and q that differ by rounding alone
            return accepted, sampler.draw((rest / rest.sum())[None])
    return len(proposed), sampler.draw(wanted[-1:])
