"""From logits to the next token: the best one, or a sample of a distribution that top-k and top-p restrict.

B batch, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def filter_logits(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Return logits [B, V] with the unlikely tokens at -inf.

    Kept are the top_k best, and of those the smallest set of best tokens whose probabilities sum to top_p or more. The
    best token always stays; of equal logits the lower token id is better.
    """
    if top_k is None and top_p is None:
        return logits
    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    removed = torch.zeros_like(values, dtype=torch.bool)
    if top_k is not None:
        removed[:, top_k:] = True
    if top_p is not None:
        probabilities = torch.softmax(values.float().masked_fill(removed, -torch.inf), dim=-1)
        removed |= probabilities.cumsum(dim=-1) - probabilities >= top_p
    removed[:, 0] = False
    return torch.empty_like(values).scatter_(-1, order, values.masked_fill(removed, -torch.inf))


@dataclass(frozen=True)
class Sampler:
    """Chooses the next tokens: logits [B, V] -> [B] int64. temperature: 0 takes the best token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution of the next token, float32 [B, V]; at temperature 0 all of it is the best one's."""
        if self.temperature == 0:
            best = torch.zeros_like(logits, dtype=torch.float32)
            return best.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        return torch.softmax(filter_logits(logits.float() / self.temperature, self.top_k, self.top_p), dim=-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        """Return a sample of each row's distribution [B, V], [B] int64; at temperature 0 the likeliest token."""
        if self.temperature == 0:
            return probabilities.argmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return self.draw(self.probabilities(logits))
