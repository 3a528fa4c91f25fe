"""The mixer of Mamba (arXiv 2312.00752): a state space with a decay for each channel and state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..part import check
from .base import MixerConfig, Parameter, State


@dataclass(frozen=True, kw_only=True)
class MambaConfig(MixerConfig):
    """Mamba: x by a short convolution with SiLU, the selective scan, whose steps, B and C are projected from x, a gate,
    the output projection."""

    kind: ClassVar[str] = "mamba"

    channels: int
    """Channels of x, each of which has a state."""
    state_size: int = 16
    """Columns of the state of each channel."""
    time_step_rank: int
    """Size of the latent from which the time steps of the channels are projected."""
    conv_kernel_size: int = 4
    """Tokens that the convolution reads, its own included."""
    use_bias: bool = False
    """Whether the projections in and out have a bias."""
    use_conv_bias: bool = True
    """Whether the convolution has a bias."""
    selection_norm: Literal["none", "without_weight", "with_weight"] = "none"
    """Whether the latent of the time steps, B and C have an RMSNorm each, and whether with a weight."""
    norm_epsilon: float | None = None
    """Epsilon of these norms; unset means the model's."""

    def _validate(self) -> None:
        for name in ("channels", "state_size", "time_step_rank", "conv_kernel_size"):
            check(getattr(self, name) > 0, f"mamba.{name}", getattr(self, name), "a positive integer")
        epsilon = self.norm_epsilon
        check(epsilon is None or epsilon > 0, "mamba.norm_epsilon", epsilon, "a positive number or null")

    @property
    def selected(self) -> tuple[int, int, int]:
        """The sizes of what is projected from x: the latent of the time steps, B and C."""
        return self.time_step_rank, self.state_size, self.state_size

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """As `MixerConfig.parameters`: the rows of `linear_in` are x and the gate z."""
        D = self.channels
        yield Parameter("conv_weight", (D, self.conv_kernel_size), (D,))
        if self.use_conv_bias:
            yield Parameter("conv_bias", (D,), (D,))
        yield Parameter("A_log", (D, self.state_size), (D,))
        for name in ("D", "dt_bias"):
            yield Parameter(name, (D,), (D,))
        if self.selection_norm == "with_weight":
            for name, size in zip(("dt_norm_weight", "B_norm_weight", "C_norm_weight"), self.selected, strict=True):
                yield Parameter(name, (size,))
        yield Parameter("linear_in.weight", (2 * D, hidden_size), (D, D))
        if self.use_bias:
            yield Parameter("linear_in.bias", (2 * D,), (D, D))
        yield Parameter("selection.weight", (sum(self.selected), D), (D,), 1)
        yield Parameter("step.weight", (D, self.time_step_rank), (D,))
        yield Parameter("linear_proj.weight", (hidden_size, D), (D,), 1)
        if self.use_bias:
            yield Parameter("linear_proj.bias", (hidden_size,))

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`."""
        return (
            State("recurrent", (self.channels, self.state_size)),
            State("convolution", (self.channels, self.conv_kernel_size - 1), dtype="cache"),
        )

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: of the recurrence: it writes to the state and reads it."""
        return 4.0 * self.channels * self.state_size

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        return {"channels": self.channels}
