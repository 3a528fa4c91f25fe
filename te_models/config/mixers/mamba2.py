"""The mixer of Mamba-2 (arXiv 2405.21060): a state space whose decay is a scalar for each head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..part import check
from .base import MixerConfig, Parameter, State


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerConfig):
    """Mamba-2: x, B and C by a short convolution with SiLU, the scan, a gated norm, the output projection."""

    kind: ClassVar[str] = "mamba2"

    num_heads: int
    """Number of heads; each has a state."""
    head_dim: int
    """Channels of each head."""
    state_size: int = 128
    """Columns of the state of each channel."""
    num_groups: int = 1
    """Groups of heads that share B and C; a group is also what the norm is over."""
    conv_kernel_size: int = 4
    """Tokens that the convolution reads, its own included."""
    use_bias: bool = False
    """Whether the projections have a bias."""
    use_output_bias: bool | None = None
    """Whether the output projection has a bias; unset means as use_bias says."""
    use_conv_bias: bool = True
    """Whether the convolution has a bias."""
    time_step_low: float = 0.0
    """The smallest time step; smaller ones are raised to it."""
    time_step_high: float | None = None
    """The largest time step; unset means any."""
    gate: Literal["before_norm", "after_norm", "no_norm"] = "before_norm"
    """Whether the output is multiplied by SiLU(z) before its norm, after it, or without one."""
    norm_epsilon: float | None = None
    """Epsilon of the norm of the output; unset means the model's."""
    input_multiplier: float = 1.0
    """Factor of the normed input."""
    row_multipliers: tuple[float, ...] | None = None
    """Factors of z, x, B, C and the time step, as they are projected; unset means 1 each."""
    output_multiplier: float = 1.0
    """Factor of the result, before it is added to the residual stream."""

    _LATER: ClassVar[frozenset[str]] = frozenset(
        {"use_output_bias", "input_multiplier", "row_multipliers", "output_multiplier"}
    )

    def _validate(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel_size"):
            check(getattr(self, name) > 0, f"mamba2.{name}", getattr(self, name), "a positive integer")
        divides = self.num_heads % self.num_groups == 0
        check(divides, "mamba2.num_groups", self.num_groups, f"a divisor of num_heads = {self.num_heads}")
        low, high = self.time_step_low, self.time_step_high
        check(low >= 0, "mamba2.time_step_low", low, "0 or more")
        check(high is None or high >= low, "mamba2.time_step_high", high, f"time_step_low = {low} or more, or null")
        epsilon = self.norm_epsilon
        check(epsilon is None or epsilon > 0, "mamba2.norm_epsilon", epsilon, "a positive number or null")
        factors = self.row_multipliers
        check(factors is None or len(factors) == 5, "mamba2.row_multipliers", factors, "five numbers, or null")

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of `linear_in`: of z, x, B, C and the time step."""
        return self.size, *self.convolved, self.num_heads

    @property
    def output_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.use_bias if self.use_output_bias is None else self.use_output_bias

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The channels that are convolved: x, B and C."""
        return self.size, self.num_groups * self.state_size, self.num_groups * self.state_size

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """As `MixerConfig.parameters`: the rows of `linear_in` are z, x, B, C and the time step."""
        rows, N = self.rows, self.num_heads
        yield Parameter("conv_weight", (sum(self.convolved), self.conv_kernel_size), self.convolved)
        if self.use_conv_bias:
            yield Parameter("conv_bias", (sum(self.convolved),), self.convolved)
        for name in ("A_log", "D", "dt_bias"):
            yield Parameter(name, (N,), (N,))
        if self.gate != "no_norm":
            yield Parameter("norm_weight", (self.size,), (self.size,))
        yield Parameter("linear_in.weight", (sum(rows), hidden_size), rows)
        if self.use_bias:
            yield Parameter("linear_in.bias", (sum(rows),), rows)
        yield Parameter("linear_proj.weight", (hidden_size, self.size), (self.size,), 1)
        if self.output_bias:
            yield Parameter("linear_proj.bias", (hidden_size,))

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`."""
        return (
            State("recurrent", (self.num_heads, self.head_dim, self.state_size)),
            State("convolution", (sum(self.convolved), self.conv_kernel_size - 1), dtype="cache"),
        )

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: of the recurrence: it writes to the state and reads it."""
        return 4.0 * self.size * self.state_size

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        return {"num_heads": self.num_heads, "num_groups": self.num_groups}
