"""Lightning attention (arXiv 2401.04658): linear attention whose decay is fixed, by head and by depth."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..part import check
from .base import MixerConfig, Parameter, State


@dataclass(frozen=True, kw_only=True)
class LightningConfig(MixerConfig):
    """Lightning attention as MiniMax-01 has it (arXiv 2501.08313): q, k and v with SiLU, a state that forgets by
    exp(-slope), a norm over all heads and a sigmoid gate. Head h of N, from 1, of layer l of L, from 0, has the slope
    2^(-8 h / N) (1 - l / (L - 1))."""

    kind: ClassVar[str] = "lightning"

    num_heads: int
    """Number of heads; each has a state."""
    head_dim: int
    """Channels of each head of q, k and v."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norm of the output."""

    def _validate(self) -> None:
        for name in ("num_heads", "head_dim", "norm_epsilon"):
            check(getattr(self, name) > 0, f"lightning.{name}", getattr(self, name), "a positive number")

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    def slopes(self, layer: int, layers: int) -> list[float]:
        """Return what the log of each head's decay is the negative of, in layer number `layer` of `layers`."""
        depth = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        return [2.0 ** (-8 * (head + 1) / self.num_heads) * depth for head in range(self.num_heads)]

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """As `MixerConfig.parameters`: the rows of `linear_in` are q, k, v and the gate."""
        D = self.size
        yield Parameter("norm_weight", (D,), (D,))
        yield Parameter("linear_in.weight", (4 * D, hidden_size), (D,) * 4)
        yield Parameter("linear_proj.weight", (hidden_size, D), (D,), 1)

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`."""
        return (State("recurrent", (self.num_heads, self.head_dim, self.head_dim)),)

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: of the recurrence: it writes to the state and reads it."""
        return 4.0 * self.size * self.head_dim

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        return {"num_heads": self.num_heads}
