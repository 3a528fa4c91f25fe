"""Perplexity of documents that may be longer than the model's window: each token is predicted once.

Windows of `seq_length` tokens begin every `stride` tokens. Each scores what the one before did not, so that all but the
first tokens of a document have at least seq_length - stride tokens of context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.cross_entropy import IGNORE_INDEX

from ..eval_mode import in_eval_mode
from ..model import GPTModel

LOSS_CHUNK = 1024
"""Logits exist for this many tokens at a time."""


@dataclass(frozen=True)
class TextScore:
    """What a model predicts of some text. nats: summed over `tokens` predictions; nbytes: of the text in UTF-8."""

    nats: float
    tokens: int
    nbytes: int
    documents: int

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: nats_per_token, perplexity, bits_per_byte (None: no text), tokens, bytes, documents."""
        mean = self.nats / self.tokens if self.tokens else None
        return {
            "nats_per_token": mean,
            "perplexity": None if mean is None or mean > 700 else math.exp(mean),
            "bits_per_byte": self.nats / math.log(2) / self.nbytes if self.nbytes else None,
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "documents": self.documents,
        }


def sliding_windows(tokens: int, seq_length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, scored) of the windows over a document: tokens begin..end are read, scored..end predicted."""
    scored = 1  # nothing predicts the first one
    for begin in range(0, max(1, tokens), stride):
        end = min(begin + seq_length, tokens)
        if scored < end:
            yield begin, end, scored
        scored = end
        if end == tokens:
            return


@torch.no_grad()
def score_documents(
    model: GPTModel,
    documents: Iterable[tuple[Sequence[int], int]],
    *,
    seq_length: int,
    stride: int | None = None,
    batch_size: int = 1,
) -> TextScore:
    """Return how well a model predicts documents, each with nothing of the others before it.

    model: on one rank, in eval mode for as long as this takes. documents: the ids of each, and how many bytes its text
    has; the first id, such as a token that begins every text, is not predicted. stride: None is half of seq_length.
    batch_size: windows in one forward pass. Raises ValueError for sizes that are not allowed, and for ids that the
    model does not have.

    Example:
        score = score_documents(model, [(token_ids, len(text.encode()))], seq_length=1024)
    """
    stride = max(1, seq_length // 2) if stride is None else stride
    most = model.config.max_position_embeddings
    if not 2 <= seq_length <= most:
        raise ValueError(f"seq_length is {seq_length}; allowed: 2 to {most}, the positions of the model")
    if not 1 <= stride < seq_length:
        raise ValueError(f"stride is {stride}; allowed: 1 to {seq_length - 1}, less than seq_length")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; allowed: 1 or more")
    device = next(model.parameters()).device
    counted = TextScore(0.0, 0, 0, 0)
    waiting: list[tuple[Sequence[int], int]] = []  # ids of a window, and how many at its end are scored
    chunk = model.output_layer.loss_chunk_tokens
    model.output_layer.loss_chunk_tokens = LOSS_CHUNK
    try:
        with in_eval_mode(model):
            for ids, nbytes in documents:
                counted += TextScore(0.0, 0, nbytes, 1)
                if ids and max(ids) >= model.config.vocab_size:
                    most = model.config.vocab_size
                    raise ValueError(f"a token is {max(ids)}; allowed: below {most}, the model's number")
                for begin, end, scored in sliding_windows(len(ids), seq_length, stride):
                    waiting.append((ids[begin:end], end - scored))
                    if len(waiting) == batch_size:
                        counted += _score(model, waiting, device)
                        waiting.clear()
            return counted + _score(model, waiting, device) if waiting else counted
    finally:
        model.output_layer.loss_chunk_tokens = chunk


def _score(model: GPTModel, windows: list[tuple[Sequence[int], int]], device: torch.device) -> TextScore:
    """Score windows [B, S], padded on the right, where causal attention does not look."""
    length, tokens = max(len(ids) for ids, _ in windows), sum(scored for _, scored in windows)
    input_ids = torch.zeros(len(windows), length, dtype=torch.int64, device="cpu")
    labels: Tensor = torch.full_like(input_ids, IGNORE_INDEX)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (ids, scored) in enumerate(windows):
        read = torch.tensor(ids, device=input_ids.device)
        input_ids[row, : len(ids)] = read
        labels[row, len(ids) - scored : len(ids)] = read[-scored:]
        mask[row, : len(ids)] = True
    padded = None if bool(mask.all()) else mask.to(device)
    output = model(input_ids.to(device), labels.to(device), attention_mask=padded, return_logits=False)
    loss = output.loss if output.aux_loss is None else output.loss - output.aux_loss
    return TextScore(float(loss) * tokens, tokens, 0, 0)
