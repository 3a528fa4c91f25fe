"""ALiBi: scores are lower by the distance of the key, times a slope of each head (arXiv 2108.12409)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_models.layers.attention.mask import usual_slopes

from ..build import Build


class AlibiHeads(NamedTuple):
    """heads: of all ranks; those of this one are `number` from `first` on."""

    heads: int
    first: int
    number: int

    @classmethod
    def of_rank(cls, heads: int, build: Build) -> AlibiHeads:
        """Return the share of a rank."""
        number = heads // build.tp_size
        return cls(heads, number * (0 if build.tp_group is None else build.tp_group.rank()), number)

    def biases(self, keys: int, device: torch.device) -> Tensor:
        """Return what is added to the scores of keys 0 to `keys` - 1, float32 [1, N, 1, keys]: minus their distance
        from the last one times the slope. The softmax takes no notice of what all keys of a query have in common, so
        that these serve queries at any place, in documents, behind padding, and in caches that are not full."""
        slopes = usual_slopes(self.heads, device)[self.first : self.first + self.number]
        distance = torch.arange(keys - 1, -1, -1, dtype=torch.float32, device=device)
        return (-distance * slopes[:, None])[None, :, None]
