"""The gated delta rule (arXiv 2412.06464): linear attention whose state forgets, and corrects what it holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..part import check
from .base import MixerConfig, Parameter, State


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(MixerConfig):
    """The gated delta rule with a scalar decay for each value head (GDN), or with one for each channel of the keys
    (KDA, arXiv 2510.26692)."""

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
    decay_by: Literal["head", "channel"] = "head"
    """Whether each value head has a decay, or each of its key channels."""
    decay_lora_rank: int | None = None
    """Size of the latent from which a decay by channel is projected; unset means none."""
    decay_lower_bound: float | None = None
    """The log of the decay lies between this and 0, by a sigmoid; unset means a softplus without bound."""
    allow_neg_eigval: bool = False
    """Whether the step is doubled, so that a state may change its sign (arXiv 2411.12537)."""
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate of the output."""
    gate_lora_rank: int | None = None
    """Size of the latent from which the gate is projected; unset means none."""
    norm_epsilon: float | None = None
    """Epsilon of the norm of each head's output; unset means the model's."""

    def _validate(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_size"):
            check(getattr(self, name) > 0, f"gated_delta.{name}", getattr(self, name), "a positive integer")
        multiple = self.num_value_heads % self.num_key_heads == 0
        allowed = f"a multiple of num_key_heads = {self.num_key_heads}"
        check(multiple, "gated_delta.num_value_heads", self.num_value_heads, allowed)
        for name in ("decay_lora_rank", "gate_lora_rank", "norm_epsilon"):
            value = getattr(self, name)
            check(value is None or value > 0, f"gated_delta.{name}", value, "a positive number or null")
        bound, rank = self.decay_lower_bound, self.decay_lora_rank
        check(bound is None or bound < 0, "gated_delta.decay_lower_bound", bound, "a negative number or null")
        by_channel = rank is None or self.decay_by == "channel"
        check(by_channel, "gated_delta.decay_lora_rank", rank, "null where decay_by is 'head'")

    @property
    def key_size(self) -> int:
        """Channels of all heads of q, or of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all heads of v."""
        return self.num_value_heads * self.value_head_dim

    @property
    def decay_size(self) -> int:
        """Number of decays of all value heads."""
        return self.num_value_heads * (self.key_head_dim if self.decay_by == "channel" else 1)

    @property
    def joined(self) -> tuple[int, ...]:
        """The rows of what `linear_in` joins: q, k, v, and where it has no latent the gate."""
        return (self.key_size, self.key_size, self.value_size) + (
            (self.value_size,) if self.gate_lora_rank is None else ()
        )

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """As `MixerConfig.parameters`: the rows of `linear_in` are q, k, v and the gate z."""
        K, V, N, D = self.key_size, self.value_size, self.num_value_heads, self.decay_size
        yield Parameter("conv_weight", (2 * K + V, self.conv_kernel_size), (K, K, V))
        yield Parameter("A_log", (N,), (N,))
        yield Parameter("dt_bias", (D,), (D,))
        yield Parameter("norm_weight", (self.value_head_dim,))
        yield Parameter("linear_in.weight", (sum(self.joined), hidden_size), self.joined)
        yield Parameter("step.weight", (N, hidden_size), (N,))
        if self.decay_lora_rank is not None:
            yield Parameter("decay_down.weight", (self.decay_lora_rank, hidden_size))
        yield Parameter("decay.weight", (D, self.decay_lora_rank or hidden_size), (D,))
        if self.gate_lora_rank is not None:
            yield Parameter("gate_down.weight", (self.gate_lora_rank, hidden_size))
            yield Parameter("gate.weight", (V, self.gate_lora_rank), (V,))
        yield Parameter("linear_proj.weight", (hidden_size, V), (V,), 1)

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`."""
        heads, rows = self.num_value_heads, self.conv_kernel_size - 1
        return (
            State("recurrent", (heads, self.key_head_dim, self.value_head_dim)),
            State("convolution", (2 * self.key_size + self.value_size, rows), dtype="cache"),
        )

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: of the recurrence: it reads the state, corrects it and reads it for the query."""
        return 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        return {"num_key_heads": self.num_key_heads, "num_value_heads": self.num_value_heads}
