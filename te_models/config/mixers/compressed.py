"""Attention to a window and to compressed keys (DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..part import ConfigPart, check

if TYPE_CHECKING:
    from ..model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(ConfigPart):
    """Attention with one head that is key and value, roped on its last channels, and undone on the output: queries from
    a latent, the output projected by groups of heads. Beside a window of tokens a query sees compressed keys, each a
    sum of several tokens by a learned softmax of each channel; with `index_topk` only those that an indexer with
    separate compressed keys chooses."""

    q_lora_rank: int
    """Size of the latent of the queries."""
    o_groups: int = 8
    """Groups of heads whose outputs are projected each by itself."""
    o_lora_rank: int = 1024
    """Channels that the output of a group is projected to."""
    rate: int | None = None
    """Tokens from one compressed key to the next; unset means that there are none."""
    overlap: bool = False
    """Whether a compressed key is made of two times as many tokens, by one projection of the first half and another of
    the second."""
    index_topk: int | None = None
    """Compressed keys that a query sees, chosen by an indexer; unset means all."""
    index_n_heads: int = 64
    """Number of index heads."""
    index_head_dim: int = 128
    """Channels of each index head."""

    def _validate(self) -> None:
        for name in ("q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim"):
            check(getattr(self, name) > 0, f"compressed.{name}", getattr(self, name), "a positive integer")
        for name in ("rate", "index_topk"):
            value = getattr(self, name)
            check(value is None or value > 0, f"compressed.{name}", value, "a positive integer or null")
        plain = self.rate is not None or (self.index_topk is None and not self.overlap)
        check(plain, "compressed.rate", None, "a number with overlap or index_topk")

    @property
    def series(self) -> int:
        """How many projections of a token compressed keys are made of."""
        return 2 if self.overlap else 1

    def cached_channels(self, channels: int) -> int:
        """Channels that a cache holds of a token for compressed keys: keys and gates, and the indexer's."""
        index = 0 if self.index_topk is None else self.index_head_dim
        return 0 if self.rate is None else 2 * self.series * (channels + index)


def check_compressed(config: ModelConfig) -> None:
    """Raise ConfigError where a layer's compressed keys cannot have its rotary embedding."""
    for layer in range(config.num_layers):
        attention, rope = config.attention_of(layer), config.rope_of(layer)
        its = None if attention is None else attention.compressed
        if attention is None or its is None:
            continue
        known = rope is not None and rope.style == "interleaved" and rope.scaling not in ("dynamic", "longrope")
        what = "null without a rope of style 'interleaved' and of the same frequencies at every length"
        check(known, "attention.compressed", its, what)
        rotated = 0 if rope is None else int(attention.rotated_channels * rope.rotary_percent)
        fits = its.index_topk is None or its.index_head_dim >= rotated
        check(
            fits, "compressed.index_head_dim", its.index_head_dim, f"at least the {rotated} channels that are rotated"
        )
        kind, wanted = config.layer_type(layer), "sliding" if its.rate is None else "full"
        check(kind == wanted, f"layer_types[{layer}]", kind, f"{wanted!r}, because of its attention.compressed")
