"""The cache of generation: one preallocated pair of tensors per layer with attention, states per recurrent mixer.

Layout [B, capacity, G, D], the layout attention computes in, so a step writes its own rows and copies nothing else.
The capacity of a layer is the cache's max_length, or what a sliding window or a chunk reaches and `SLACK` more: when
such a buffer is full, what is still in reach moves to its front, once in `SLACK` tokens. Latent attention keeps its
latent and its shared key part instead of keys and values, with G = 1. Index keys of sparse attention lie behind the
channels of the second tensor, a part of them in each head.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from te_models.kernels.without_autocast import autocast_dtype

from ...config import ModelConfig
from .states import PairMemory, StateMemory

SLACK = 128
"""Positions of a bounded layer beside those in reach: how many tokens are written before a buffer is moved."""


class LayerMemory(Protocol):
    """What attention needs of a cache. length: the number of positions before this call's."""

    length: int

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`."""
        ...

    def hidden_slots(self) -> Tensor | None:
        """Return which of the keys that `update` returned the query does not see, [B or 1, 1, 1, L] bool, where they
        are slots in no order; None: they are positions, the queries' own last."""
        ...


class Memory(Protocol):
    """What a model needs of a cache: `KVCache`, or another one that grows."""

    length: int

    @property
    def layers(self) -> Sequence[Any]:
        """One per layer of the model: a LayerMemory, a StateMemory, a PairMemory of both, or None without a mixer."""
        ...

    def check_room(self, batch_size: int, tokens: int) -> None:
        """See `KVCache.check_room`."""
        ...

    def advance(self, tokens: int) -> None:
        """See `KVCache.advance`."""
        ...


class LayerCache:
    """One layer's keys and values. `length` positions are valid before this call; the model advances it afterwards.

    reach: how many positions before its own a query sees at most; None: all. rollback: how many positions `crop` may
    take away. `first`: the position in the first slot of the buffer.
    """

    def __init__(self, key: Tensor, value: Tensor, reach: int | None, rollback: int = 0) -> None:
        self.key = key
        self.value = value
        self.reach = reach
        self.rollback = rollback
        self.length = 0
        self.first = 0

    def hidden_slots(self) -> None:
        """What `update` returns are positions in order."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [B, S, G, D] and value [B, S, G, Dv] behind the valid positions. Return all that this call's
        queries can see, [B, L, G, D] and [B, L, G, Dv], the queries' own positions last."""
        check_dtype(self.key, key)
        new = key.shape[1]
        if self.reach is None:
            begin, end = self.length, self.length + new
            self.key[:, begin:end] = key
            self.value[:, begin:end] = value
            return self.key[:, :end], self.value[:, :end]
        stored, seen = self.length - self.first, min(self.length, self.reach)
        if stored + new <= self.key.shape[1]:
            self.key[:, stored : stored + new] = key
            self.value[:, stored : stored + new] = value
            return self.key[:, stored - seen : stored + new], self.value[:, stored - seen : stored + new]
        remaining = min(stored + new, self.reach + self.rollback)
        found = (
            self._moved(self.key, key, stored, seen, remaining),
            self._moved(self.value, value, stored, seen, remaining),
        )
        self.first = self.length + new - remaining
        return found

    @staticmethod
    def _moved(buffer: Tensor, x: Tensor, stored: int, seen: int, remaining: int) -> Tensor:
        """Leave the last `remaining` of a buffer's `stored` positions and of x at the front of the buffer. Return the
        last `seen` of the buffer and x."""
        visible = torch.cat((buffer[:, stored - seen : stored].to(x.dtype), x), dim=1) if seen else x
        old = max(0, remaining - x.shape[1])
        if old:
            buffer[:, :old] = buffer[:, stored - old : stored].clone()
        buffer[:, old:remaining] = x[:, x.shape[1] - (remaining - old) :]
        return visible


def check_dtype(stored: Tensor, key: Tensor) -> None:
    """Raise ValueError where a cache holds another dtype than the model computes in, without autocast."""
    if key.dtype != stored.dtype and autocast_dtype(key.device.type) is None:
        raise ValueError(
            f"the cache holds {stored.dtype}, but the model computes in {key.dtype}; pass that as its dtype"
        )


def joint_memory(attention: Any, states: StateMemory | None) -> Any:
    """Return the memory of a layer from the memories of its attention and of its other mixer, None where it has
    none."""
    if states is None:
        return attention
    return states if attention is None else PairMemory(attention, states)


def reach_of(config: ModelConfig, layer: int) -> int | None:
    """Return how many positions before its own a query of a layer sees at most; None: all."""
    bounds = [size for size in (config.window_size(layer), config.chunk_size(layer)) if size is not None]
    return min(bounds) - 1 if bounds else None


def check_sizes(batch_size: int, max_length: int) -> None:
    """Raise ValueError for a cache without sequences or without tokens."""
    if batch_size < 1 or max_length < 1:
        raise ValueError(f"a cache of {batch_size} sequences of {max_length} tokens; allowed: at least 1 of each")


def cached_shapes(
    config: ModelConfig, layer: int, batch_size: int, max_length: int, tp_size: int, beside_reach: int
) -> list[tuple[int, ...]]:
    """Return the shapes [B, capacity, G, D] of the keys and the values of a layer; none for a layer that caches none. A
    bounded layer has `beside_reach` positions more than are in reach."""
    attention, reach = config.attention_of(layer), reach_of(config, layer)
    if attention is None or config.kv_source(layer) is not None:
        return []
    groups, sizes = attention.cached_sizes(tp_size)
    capacity = max_length if reach is None else min(max_length, reach + beside_reach)
    return [(batch_size, capacity, groups, size) for size in sizes]


class KVCache:
    """What all layers of a model remember of a batch of sequences of up to max_length tokens: keys and values, or the
    states of recurrent mixers.

    Layers with a sliding window or with chunks keep what these reach, whatever max_length is. dtype: the model's
    compute dtype (None: torch's default). tp_size: `GPTModel.tp_size`; each rank caches the keys and values of its
    heads. rollback: how many positions `crop` may take away from layers that are bounded; above 0, the states behind
    the last calls are kept, too. layers: the numbers of the layers whose memory is kept; None: all.

    Example:
        cache = KVCache(model.config, batch_size=1, max_length=256, dtype=torch.bfloat16)
        model(prompt, cache=cache)            # fills prompt.shape[1] positions
        model(next_token[:, None], cache=cache)

    Raises ValueError for a batch or length below 1, and when a call has another batch size, or does not fit max_length.
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
        rollback: int = 0,
        layers: Sequence[int] | None = None,
    ) -> None:
        check_sizes(batch_size, max_length)
        self.batch_size = batch_size
        self.max_length = max_length
        self.length = 0
        self.layers: list[Any] = []
        self._keys: dict[int, LayerCache] = {}
        self._states: list[StateMemory] = []
        for i in range(config.num_layers) if layers is None else layers:
            mixer, states = config.mixer_of(i), None
            if shapes := cached_shapes(config, i, batch_size, max_length, tp_size, rollback + SLACK):
                # empty: `update` returns no position that was not written
                key, value = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
                self._keys[len(self.layers)] = LayerCache(key, value, reach_of(config, i), rollback)
            if mixer is not None:
                states = StateMemory(mixer, batch_size, tp_size, dtype, device, rollback=rollback)
                self._states.append(states)
            self.layers.append(joint_memory(self._keys.get(len(self.layers)), states))

    @property
    def nbytes(self) -> int:
        """The bytes of all keys, values and states."""
        keys = sum(t.nbytes for layer in self._keys.values() for t in (layer.key, layer.value))
        return keys + sum(states.nbytes for states in self._states)

    def check_room(self, batch_size: int, tokens: int) -> None:
        """Raise ValueError unless `tokens` more positions of `batch_size` sequences fit."""
        if batch_size != self.batch_size:
            raise ValueError(f"the cache is for {self.batch_size} sequences, the input has {batch_size}")
        if self.length + tokens > self.max_length:
            raise ValueError(
                f"the cache has room for {self.max_length} tokens and holds {self.length}; {tokens} more do not fit"
            )

    def advance(self, tokens: int) -> None:
        """Count `tokens` more positions as valid, after all layers have stored them."""
        self.length += tokens
        for layer in self._keys.values():
            layer.length = self.length
        for states in self._states:
            states.advance(self.length)

    def crop(self, length: int) -> None:
        """Forget the positions from `length` on. The states of recurrent mixers are known behind the calls before
        alone: with them more may be forgotten, up to `length` of the cache, from which the text is to be read again.
        Raises ValueError for more than there are, and where a bounded layer has dropped positions that would be in
        reach again."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; allowed: 0 to the {self.length} tokens of the cache")
        for states in self._states:
            length = states.nearest(length)
        for i, layer in self._keys.items():
            if layer.reach is not None and length and layer.first > max(0, length - layer.reach):
                raise ValueError(
                    f"layer {i} has dropped positions that are in reach of position {length}; allowed: to take away up "
                    f"to {layer.rollback} positions, the cache's rollback"
                )
        self.length = length
        for layer in self._keys.values():
            layer.length, layer.first = length, layer.first if length else 0
        for states in self._states:
            states.crop(length)

    def reset(self) -> None:
        """Forget everything stored."""
        self.crop(0)
