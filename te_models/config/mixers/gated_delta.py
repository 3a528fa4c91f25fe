"""The gated delta rule (arXiv 2412.06464): linear attention whose state forgets, and corrects what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..part import check
from .base import MixerConfig, Parameter, State


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(MixerConfig):
    """The gated delta rule with a scalar decay for each value head (GDN)."""

    kind: ClassVar[str] = "gated_delta"

    num_key_heads: int
    """Number of heads of q and k."""
    num_value_heads: int
    """Number of heads of v, a multiple of the key heads; each has a state."""
    key_head_dim: int
    """Channels of each head of q and k."""
    value_head_dim: int
    """Channels of each head of v."""
    conv_kernel_size: int = 4
    """Tokens that the convolution before the rule reads, its own included."""

    def _validate(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_size"):
            check(getattr(self, name) > 0, f"gated_delta.{name}", getattr(self, name), "a positive integer")
        multiple = self.num_value_heads % self.num_key_heads == 0
        allowed = f"a multiple of num_key_heads = {self.num_key_heads}"
        check(multiple, "gated_delta.num_value_heads", self.num_value_heads, allowed)

    @property
    def key_size(self) -> int:
        """Channels of all heads of q, or of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all heads of v."""
        return self.num_value_heads * self.value_head_dim

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """As `MixerConfig.parameters`: the rows of `linear_in` are q, k, v and the gate z; those of `step_weight` the
        step b and the decay a of each value head."""
        K, V, N = self.key_size, self.value_size, self.num_value_heads
        yield Parameter("linear_in.weight", (2 * K + 2 * V, hidden_size), (K, K, V, V))
        yield Parameter("step_weight", (2 * N, hidden_size), (N, N))
        yield Parameter("conv_weight", (2 * K + V, self.conv_kernel_size), (K, K, V))
        yield Parameter("A_log", (N,), (N,))
        yield Parameter("dt_bias", (N,), (N,))
        yield Parameter("norm_weight", (self.value_head_dim,))
        yield Parameter("linear_proj.weight", (hidden_size, V), (V,), 1)

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`."""
        heads, rows = self.num_value_heads, self.conv_kernel_size - 1
        return (
            State("recurrent", (heads, self.key_head_dim, self.value_head_dim)),
            State("convolution", (2 * self.key_size + self.value_size, rows), dtype="cache"),
        )

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: of the recurrence, which reads the state, corrects it and reads it for the query."""
        return 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        return {"num_key_heads": self.num_key_heads, "num_value_heads": self.num_value_heads}
