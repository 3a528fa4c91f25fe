"""A cache whose tensors never change their shape: one graph decodes every token.

A step writes its row by index, position modulo size, and looks at all slots; a mask, computed from the position on the
device, hides those that the query does not see. Layers with a sliding window or with chunks have as many slots as these
reach. The prompt is read as without a cache and its end is stored.

B batch, L slots, G key/value heads, D channels.
"""

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.asserted import asserted

from ...config import ModelConfig
from .kv_cache import cached_shapes, check_dtype, check_sizes, joint_memory
from .states import StateMemory


class StaticLayerCache:
    """One layer's slots. position: int64 [], that of the next token. padding: int64 [B], of each row's prompt."""

    def __init__(
        self, key: Tensor, value: Tensor, position: Tensor, padding: Tensor, window: int | None, chunk: int | None
    ) -> None:
        self.key = key
        self.value = value
        self.position = position
        self.padding = padding
        self.window = window
        self.chunk = chunk
        self.length = 0

    def hidden_slots(self) -> None:
        """What `update` returns is the prompt."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the end of a prompt's key [B, S, G, D] and value [B, S, G, Dv]; return both."""
        check_dtype(self.key, key)
        length, size = key.shape[1], self.key.shape[1]
        positions = torch.arange(max(0, length - size), length, device=key.device)
        for slots, x in ((self.key, key), (self.value, value)):
            slots.index_copy_(1, positions % size, x[:, max(0, length - size) :].to(slots.dtype))
        return key, value


class StaticLayerStep:
    """A `StaticLayerCache` for one more token."""

    length = 0

    def __init__(self, cache: StaticLayerCache) -> None:
        self.cache = cache

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [B, 1, G, D] and value [B, 1, G, Dv]. Return all slots, [B, L, G, D] and [B, L, G, Dv]."""
        cache = self.cache
        check_dtype(cache.key, key)
        slot = (cache.position % cache.key.shape[1])[None]
        for slots, x in ((cache.key, key), (cache.value, value)):
            slots.index_copy_(1, slot, x.to(slots.dtype))
        return cache.key, cache.value

    def hidden_slots(self) -> Tensor:
        """As `LayerMemory.hidden_slots`: slots without a position, with padding, and out of the query's reach."""
        cache, size = self.cache, self.cache.key.shape[1]
        now, padding = cache.position, cache.padding[:, None]
        slots = torch.arange(size, device=now.device)
        place = slots + torch.div(now - slots, size, rounding_mode="floor") * size  # the latest position in each slot
        hidden = (place < 0) | (place < padding)
        if cache.window is not None:
            hidden = hidden | (place <= now - cache.window)
        if cache.chunk is not None:
            own = torch.div(now - padding, cache.chunk, rounding_mode="floor")
            hidden = hidden | (torch.div(place - padding, cache.chunk, rounding_mode="floor") != own)
        return hidden[:, None, None, :]


class StaticStep:
    """A `StaticKVCache` as the `Memory` of a call with one token per row, in which no number changes from call to call:
    give position_ids, and no attention_mask. The caller counts with `position.add_(1)`."""

    length = 0

    def __init__(self, position: Tensor, layers: list[Any], max_length: int) -> None:
        self.position = position
        self.layers = layers
        self.max_length = max_length

    def check_room(self, batch_size: int, tokens: int) -> None:
        """Raise ValueError for several tokens: the graph is that of one. Raise RuntimeError where the device finds all
        slots occupied: the next token would overwrite the first."""
        if tokens != 1:
            raise ValueError(f"the input has {tokens} tokens per row; allowed behind a prompt in a StaticKVCache: 1")
        asserted(self.position < self.max_length, f"the static cache has room for {self.max_length} tokens and is full")

    def advance(self, tokens: int) -> None:
        """The caller counts."""


class StaticKVCache:
    """Keys and values of a batch in tensors of fixed shape, for decoding in one graph (`generate(compile=True)`).

    Arguments as for `KVCache`. A model reads the prompt with this cache, and each token after it with `step`.

    Example:
        cache = StaticKVCache(model.config, batch_size=1, max_length=256)
        model(prompt, cache=cache)
        position_ids = torch.full((1, 1), prompt.shape[1])
        model(token[:, None], position_ids=position_ids, cache=cache.step)
        cache.step.position.add_(1)

    Raises ValueError for a batch or length below 1, and for a call that does not begin at position 0; RuntimeError for
    a token past max_length.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tp_size: int = 1,
    ) -> None:
        check_sizes(batch_size, max_length)
        self.batch_size = batch_size
        self.max_length = max_length
        self.dtype = dtype
        self.length = 0
        position = torch.zeros((), dtype=torch.int64, device=device)
        self.padding = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.layers: list[Any] = []
        self._states: list[StateMemory] = []
        steps: list[Any] = []
        for i in range(config.num_layers):
            mixer, prompt, states = config.mixer_of(i), None, None
            if shapes := cached_shapes(config, i, batch_size, max_length, tp_size, 1):
                key, value = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
                bounds = config.window_size(i), config.chunk_size(i)
                prompt = StaticLayerCache(key, value, position, self.padding, *bounds)
            if mixer is not None:
                states = StateMemory(mixer, batch_size, tp_size, dtype, device, in_place=True)
                self._states.append(states)
            self.layers.append(joint_memory(prompt, states))
            steps.append(joint_memory(None if prompt is None else StaticLayerStep(prompt), states))
        self.step = StaticStep(position, steps, max_length)

    def check_room(self, batch_size: int, tokens: int) -> None:
        """Raise ValueError unless a prompt of `tokens` for `batch_size` sequences fits, and is the first."""
        if batch_size != self.batch_size:
            raise ValueError(f"the cache is for {self.batch_size} sequences, the input has {batch_size}")
        if self.length:
            raise ValueError(f"the cache holds {self.length} tokens; allowed for more: its `step`, token by token")
        if tokens > self.max_length:
            raise ValueError(f"the cache has room for {self.max_length} tokens; {tokens} do not fit")

    def advance(self, tokens: int) -> None:
        """Count the prompt as stored."""
        self.length += tokens
        self.step.position.fill_(self.length)

    def set_padding(self, mask: Tensor) -> None:
        """Say where prompts are padded. mask: [B, S] bool, False at padding, on the left."""
        self.padding.copy_((~mask).sum(dim=1))

    def reset(self) -> None:
        """Forget everything stored; what slots hold is hidden, or overwritten, from now on."""
        self.length = 0
        self.step.position.zero_()
        for states in self._states:
            states.reset()
