"""An activation as a forward and a backward pass, for callers that run their own backward pass.

They can have the result as FP8, through which autograd cannot go. On CPU the backward pass is the derivative of the
reference; on an accelerator it is a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..derivative import gradients_of
from ..quantize.output import QuantizedOutput
from . import op, quantized


@dataclass(frozen=True)
class Activation:
    """Which activation; the fields are the arguments of `activation` and `gated_activation`."""

    name: str
    gated: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        op.check_name(self.name)

    def _options(self) -> dict[str, Any]:
        return {"clamp": self.clamp, "alpha": self.alpha, "up_offset": self.up_offset} if self.gated else {}

    def forward(self, x: Tensor, probabilities: Tensor | None = None) -> Tensor:
        """Return the activation of x [..., F], or of [gate | up] [..., 2F]; times probabilities [...], if given."""
        function = op.gated_activation if self.gated else op.activation
        return function(x, self.name, probabilities=probabilities, **self._options())

    def forward_quantized(
        self, x: Tensor, probabilities: Tensor | None, output: QuantizedOutput, scale: Tensor | None
    ) -> list[Tensor]:
        """Return the activation as `output` says, as a matrix."""
        function = quantized.gated_activation_quantized if self.gated else quantized.activation_quantized
        return function(x, self.name, output, scale, probabilities=probabilities, **self._options())

    def backward(
        self, dy: Tensor, x: Tensor, probabilities: Tensor | None = None, needs_probabilities: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and, if they are wanted, of the probabilities."""
        if x.device.type == "cuda":
            options = (self.name, self.gated, self.clamp, self.alpha, self.up_offset)
            dx, dp = op.activation_bwd(dy, x, probabilities, *options, needs_probabilities)
            return dx, None if probabilities is None or not needs_probabilities else dp.to(probabilities.dtype)
        if probabilities is not None and needs_probabilities:
            dx, dp = gradients_of(self.forward, (x, probabilities), dy)
            return dx, dp
        (dx,) = gradients_of(lambda x: self.forward(x, probabilities), (x,), dy)
        return dx, None
