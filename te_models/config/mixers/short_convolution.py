"""A gated short convolution as the mixer of a layer (LFM2, arXiv 2511.23404)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..part import check
from .base import MixerConfig, Parameter, State


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionConfig(MixerConfig):
    """C times the causal depthwise convolution of B times x, all three projections of the input, and a projection."""

    kind: ClassVar[str] = "short_convolution"

    channels: int
    """Channels of B, of C and of x."""
    conv_kernel_size: int = 3
    """Tokens that the convolution reads, its own included."""
    use_bias: bool = False
    """Whether the projections and the convolution have a bias."""

    def _validate(self) -> None:
        for name in ("channels", "conv_kernel_size"):
            check(getattr(self, name) > 0, f"short_convolution.{name}", getattr(self, name), "a positive integer")

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """As `MixerConfig.parameters`: the rows of `linear_in` are B, C and x."""
        D = self.channels
        yield Parameter("conv_weight", (D, self.conv_kernel_size), (D,))
        if self.use_bias:
            yield Parameter("conv_bias", (D,), (D,))
        yield Parameter("linear_in.weight", (3 * D, hidden_size), (D, D, D))
        if self.use_bias:
            yield Parameter("linear_in.bias", (3 * D,), (D, D, D))
        yield Parameter("linear_proj.weight", (hidden_size, D), (D,), 1)
        if self.use_bias:
            yield Parameter("linear_proj.bias", (hidden_size,))

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`."""
        return (State("convolution", (self.channels, self.conv_kernel_size - 1), dtype="cache"),)

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: nothing beside its weights."""
        return 0.0

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        return {"channels": self.channels}
