"""transformers' key-value caches behind the interface that our layers use.

transformers keeps [B, G, L, D], ours works on [B, L, G, D]: both are views of each other. So beams, contrastive and
assisted generation, offloading and whatever else works on transformers' caches works here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..config import ModelConfig
from ..extras import require

if TYPE_CHECKING:
    import transformers
    import transformers.modeling_outputs
else:
    transformers = require("transformers", "hf", feature="te_models.hf")

_OUTPUT_FIELDS = transformers.modeling_outputs.CausalLMOutputWithPast.__dataclass_fields__
CACHE = "cache" if "cache" in _OUTPUT_FIELDS else "past_key_values"
"""What the transformers that is installed calls a model's cache: `cache` from 5.24 on, `past_key_values` before."""


def one_cache(
    cache: transformers.Cache | None, past_key_values: transformers.Cache | None
) -> transformers.Cache | None:
    """Return the cache that was passed under one of its two names. Raises ValueError where both were."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument; allowed: one of them")
    return past_key_values if cache is None else cache


class TransformersLayer:
    """One layer of a transformers cache: of all positions, or of those that a sliding window reaches."""

    def __init__(self, past: transformers.Cache, layer: int, length: int, window: int | None) -> None:
        self.past = past
        self.layer = layer
        self.length = length
        self.window = window

    def hidden_slots(self) -> None:
        """What `update` returns are positions in order."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As `LayerCache.update`: store [B, S, G, D] and [B, S, G, Dv], return all that the queries can see. Raises
        ValueError if the cache has dropped some of it."""
        keys, values = self.past.update(key.transpose(1, 2), value.transpose(1, 2), self.layer)
        reached = self.length if self.window is None else min(self.length, self.window - 1)
        needed = reached + key.shape[1]
        if keys.shape[2] < needed:
            raise ValueError(
                f"layer {self.layer} of the {type(self.past).__name__} keeps {keys.shape[2] - key.shape[1]} of the "
                f"{reached} positions that this layer looks at; allowed: DynamicCache(), which keeps all"
            )
        first = keys.shape[2] - needed
        return keys[:, :, first:].transpose(1, 2), values[:, :, first:].transpose(1, 2)


class TransformersCache:
    """A transformers cache for one call of a `GPTModel`.

    Raises ValueError for a cache of fixed size: its unused positions would have to be hidden by its masks.
    """

    def __init__(self, past: transformers.Cache, config: ModelConfig) -> None:
        if past.is_compileable:
            raise ValueError(
                f"{type(past).__name__} has a fixed size; allowed: caches that grow, as cache_implementation='dynamic'"
            )
        if config.is_recurrent:
            raise ValueError(
                "the model has recurrent mixers, whose states caches of transformers do not hold; allowed: "
                "use_cache=False, or GPTModel.generate"
            )
        self.past = past
        self.length = int(past.get_seq_length())
        self.layers = [TransformersLayer(past, i, self.length, config.window_size(i)) for i in range(config.num_layers)]

    def check_room(self, batch_size: int, tokens: int) -> None:
        """There always is: the cache grows, and refuses another batch size itself."""

    def advance(self, tokens: int) -> None:
        """The cache has counted the positions when they were stored."""
        self.length += tokens
