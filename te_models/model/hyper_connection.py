"""Hyper-connections around the sublayers of a model whose residual stream has several lanes.

B batch, S sequence, M lanes, H hidden. Between layers the lanes of a token lie side by side, [B, S, M H].
"""

import functools

import torch
from torch import Tensor, nn

from te_models.kernels.hyper_connections import Mixing, add_to_lanes, collapsed, mixing_of, read_weights

from ..config import HyperConnectionConfig, ModelConfig
from .build import Build, init_method


class HyperConnection(nn.Module):
    """What a sublayer reads of the lanes, and how it writes to them; computed in float32. Megatron-Core:
    `HyperConnectionModule`.

    weight: [M (2 + M), M H], its rows for reading, writing and mixing in turn; bias: [M (2 + M)]; scale: [3], of each
    of the three. output: the weights of the final norm's input alone, weight [M, M H], bias [M], scale [1].
    """

    def __init__(
        self, config: ModelConfig, hyper: HyperConnectionConfig, build: Build, *, output: bool = False
    ) -> None:
        super().__init__()
        self.lanes, self.output = hyper.lanes, output
        rows, scales = (hyper.lanes, 1) if output else (hyper.lanes * (2 + hyper.lanes), 3)
        self.init_method = init_method(config)
        self.weight = build.parameter(rows, hyper.lanes * config.hidden_size)
        self.bias = build.parameter(rows)
        self.scale = build.parameter(scales)
        options = {"eps": hyper.epsilon, "norm_eps": config.norm.layernorm_epsilon}
        self._read = functools.partial(read_weights, **options)
        self._mix = functools.partial(mixing_of, iterations=hyper.sinkhorn_iterations, **options)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight; the rest starts as if it were not there."""
        self.init_method(self.weight)
        self.bias.zero_()
        self.scale.fill_(1.0)

    def read(self, x: Tensor) -> tuple[Tensor, Mixing | None]:
        """x: [..., M H] -> what the sublayer reads, [..., H], and how `write` mixes; None of the output."""
        lanes, mixing = x.unflatten(-1, (self.lanes, -1)), None
        if self.output:
            weights = self._read(lanes, self.weight, self.bias, self.scale)
        else:
            mixing = self._mix(lanes, self.weight, self.bias, self.scale)
            weights = mixing.read
        return collapsed(lanes, weights), mixing

    def write(self, x: Tensor, y: Tensor, mixing: Mixing) -> Tensor:
        """x: [..., M H], y: [..., H], what the sublayer computed -> [..., M H]."""
        return add_to_lanes(x.unflatten(-1, (self.lanes, -1)), y, mixing).flatten(-2)
