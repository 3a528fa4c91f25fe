"""The key-value cache of generation: one preallocated pair of tensors per layer.

Layout [B, max_length, G, D], the layout attention computes in, so a step writes its own rows and copies nothing else.
Sliding-window layers keep all positions too, but hand out only those that the window can reach. Latent attention keeps
its latent and its shared key part instead of keys and values, with G = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from te_models.layers.functional.gemm_operand import autocast_dtype

from ..config import ModelConfig


class LayerMemory(Protocol):
    """What a layer needs of a cache."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`."""
        ...


class Memory(Protocol):
    """What a model needs of a cache: `KVCache`, or another one that grows."""

    length: int

    @property
    def layers(self) -> Sequence[LayerMemory]:
        """One per layer of the model."""
        ...

    def check_room(self, batch_size: int, tokens: int) -> None:
        """See `KVCache.check_room`."""
        ...

    def advance(self, tokens: int) -> None:
        """See `KVCache.advance`."""
        ...


class LayerCache:
    """One layer's keys and values. `length` positions are valid before this call; the model advances it afterwards."""

    def __init__(self, key: Tensor, value: Tensor, window: int | None) -> None:
        self.key = key
        self.value = value
        self.window = window
        self.length = 0

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [B, S, G, D] and value [B, S, G, Dv] behind the valid positions. Return views of all that this
        call's queries can see, [B, L, G, D] and [B, L, G, Dv], the queries' own positions last."""
        if key.dtype != self.key.dtype and autocast_dtype(key.device.type) is None:
            raise ValueError(
                f"the cache holds {self.key.dtype}, but the model computes in {key.dtype}; pass that as its dtype"
            )
        begin, end = self.length, self.length + key.shape[1]
        self.key[:, begin:end] = key
        self.value[:, begin:end] = value
        first = 0 if self.window is None else max(0, begin - (self.window - 1))
        return self.key[:, first:end], self.value[:, first:end]


class KVCache:
    """Keys and values of all layers of a model for a batch of sequences of up to max_length tokens.

    dtype: the model's compute dtype (None: torch's default). tp_size: `GPTModel.tp_size`; each rank caches the keys and
    values of its own heads.

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
    ) -> None:
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"a cache of {batch_size} sequences of {max_length} tokens; allowed: at least 1 of each")
        a = config.attention
        channels = a.kv_channels or config.hidden_size // a.num_attention_heads
        groups = (a.num_query_groups or a.num_attention_heads) // tp_size
        sizes = channels, a.v_head_dim or channels
        if a.mla is not None:
            sizes, groups = (a.mla.kv_lora_rank, a.mla.qk_pos_emb_head_dim), 1
        self.batch_size = batch_size
        self.max_length = max_length
        self.length = 0
        self.layers: list[LayerCache] = []
        for i in range(config.num_layers):
            key, value = (
                torch.zeros(batch_size, max_length, groups, size, dtype=dtype, device=device) for size in sizes
            )
            self.layers.append(LayerCache(key, value, config.window_size(i)))

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
        for layer in self.layers:
            layer.length = self.length

    def reset(self) -> None:
        """Forget everything stored."""
        self.advance(-self.length)
