"""The rotary embedding as a module: a RopeConfig's frequencies, turned into cos and sin tables for given positions."""

import dataclasses

import torch
from torch import Tensor

from te_models.kernels.rope import rope_frequencies, rope_tables

from ..config import RopeConfig
from .constants import ConstantModule

Rotary = tuple[Tensor, Tensor]
"""cos and sin, float32 [B or 1, S, R/2]."""


class RotaryEmbedding(ConstantModule):
    """cos and sin tables of the positions, in float32. Layers with equal RopeConfigs share one.

    The two extensions that depend on the sequence length, "dynamic" and "longrope", choose by the largest position of
    each call, on the device: no host synchronisation, no recompilation as the sequence grows.
    """

    frequencies: Tensor
    long_frequencies: Tensor  # of "longrope" only, for sequences longer than in the first training

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_position_embeddings: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.attention_factor = self._frequencies(None, torch.device("cpu"))[1]
        self.register_constants(device)

    def _frequencies(self, sequence_length: Tensor | None, device: torch.device) -> tuple[Tensor, float]:
        rope = self.rope
        named = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
        base, style = named.pop("rotary_base"), named.pop("style")
        assert style in ("half", "interleaved")
        return rope_frequencies(
            self.head_dim,
            base,
            max_position_embeddings=self.max_position_embeddings,
            sequence_length=sequence_length,
            device=device,
            **named,
        )

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        found = {"frequencies": self._frequencies(None, device)[0]}
        if self.rope.scaling == "longrope":
            # made here: its divisors are a list, and a device that is given one in every call makes the host wait
            longest = torch.full((), torch.iinfo(torch.int64).max, device=device)
            found["long_frequencies"] = self._frequencies(longest, device)[0]
        return found

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.rope.scaling in ("dynamic", "longrope") and self.rope.alpha is None

    @property
    def original_length(self) -> int:
        """The length of the sequences of the first training."""
        return self.rope.original_max_position_embeddings or self.max_position_embeddings

    def stage(self, length: int) -> int:
        """Return what the frequencies depend on: sequences of the same stage are rotated alike."""
        original = self.original_length
        if not self.by_length:
            return 0
        return int(length > original) if self.rope.scaling == "longrope" else max(length, original)

    def forward(self, position_ids: Tensor) -> Rotary:
        """position_ids: [B or 1, S] int64 -> (cos, sin), float32 [B or 1, S, R/2]."""
        frequencies = self.frequencies
        if self.by_length:
            length = position_ids.max() + 1
            if self.rope.scaling == "longrope":
                frequencies = torch.where(length > self.original_length, self.long_frequencies, frequencies)
            else:
                frequencies = self._frequencies(length, position_ids.device)[0]
        return rope_tables(position_ids, frequencies, self.attention_factor)
