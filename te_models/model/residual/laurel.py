"""A learned augmented residual of low rank beside attention (LAuReL, arXiv 2411.07501)."""

import math

from torch import Tensor, nn

from te_models.layers.module.linear import Linear

from ...config import ModelConfig
from ..build import Build, init_method, make_norm


class Laurel(nn.Module):
    """`x + norm(right(left(x)))` of the normed input x. Every rank that splits attention has all of it."""

    def __init__(self, config: ModelConfig, rank: int, build: Build) -> None:
        super().__init__()
        start, size = init_method(config), config.hidden_size
        self.linear_left = Linear(size, rank, False, **build.gemm(start))
        self.linear_right = Linear(rank, size, False, **build.gemm(start))
        self.layernorm = make_norm(config.norm, size, build)

    def forward(self, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """x: the stream; normed: what attention read; attended: its result, all [B, S, H] -> the stream behind it."""
        augmented = normed + self.layernorm(self.linear_right(self.linear_left(normed)))
        return (x + attended + augmented) * math.sqrt(0.5)
