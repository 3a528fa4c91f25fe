"""Alternating updates (AltUp, arXiv 2301.13310): a residual stream of several lanes, of which each layer reads one.

B batch, S sequence, M lanes, H hidden. Between layers the lanes of a token lie side by side, [B, S, M H].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.without_autocast import without_autocast
from te_models.layers.module.linear import Linear

from ...config import AlternatingUpdatesConfig, ModelConfig
from ..build import Build, init_method, make_norm

_LEAST = 1e-5
"""The smallest mean square that a lane is divided by."""


class AlternatingUpdates(nn.Module):
    """How one layer predicts the lanes, and corrects them. Every rank that splits the layer has all of it; the mixes
    are computed in float32.

    router: [M, H] gives, of a normed lane, M numbers by tanh; prediction: [M M, M] makes the mixing matrix of them,
    correction: [M, M] the weights with which lanes take the layer's error, 1 added; scale: [H].
    """

    def __init__(self, config: ModelConfig, its: AlternatingUpdatesConfig, build: Build) -> None:
        super().__init__()
        self.config, self.init_method, lanes = its, init_method(config), its.lanes
        self.layernorm = make_norm(config.norm, config.hidden_size, build)
        self.router = build.parameter(lanes, config.hidden_size)
        self.prediction = build.parameter(lanes * lanes, lanes)
        self.correction = build.parameter(lanes, lanes)
        self.scale = build.parameter(config.hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the mixes; each channel's factor starts at 1, so that all of the layer's embedding learns."""
        for weight in (self.router, self.prediction, self.correction):
            self.init_method(weight)
        self.scale.fill_(1.0)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, S, M H] -> the predicted lanes [B, S, M, H], and the one that the layer reads, [B, S, H]."""
        lanes = x.unflatten(-1, (self.config.lanes, -1))
        with without_autocast(x):
            mix = F.linear(self._routed(lanes[..., self.config.active, :]), self._clipped(self.prediction))
            wide = lanes.float()
            predicted = wide + mix.unflatten(-1, (self.config.lanes, -1)) @ wide
        predicted = predicted.to(x.dtype)
        return predicted, predicted[..., self.config.active, :]

    def correct(self, predicted: Tensor, activated: Tensor) -> tuple[Tensor, Tensor]:
        """predicted: [B, S, M, H]; activated: [B, S, H], what the layer made of its lane -> the corrected lanes, and
        what the layer's embedding reads, [B, S, H]."""
        with without_autocast(activated):
            weights = F.linear(self._routed(activated), self._clipped(self.correction)) + 1.0
            error = activated.float() - predicted[..., self.config.active, :].float()
            corrected = (predicted.float() + weights[..., None] * error[..., None, :]).to(predicted.dtype)
            first = corrected[..., self.config.active, :]
            if self.config.correct_scale:
                first = (first.float() * self.scale.float()).to(first.dtype)
        return corrected, first

    def _routed(self, x: Tensor) -> Tensor:
        normed = self.layernorm(x).float() / x.shape[-1]
        return torch.tanh(F.linear(normed, self.router.float()))

    def _clipped(self, weight: Tensor) -> Tensor:
        weight, bound = weight.float(), self.config.coef_clip
        return weight.clamp(-bound, bound) if self.training and bound is not None else weight


class LaneProjections(nn.Module):
    """The lanes before the first layer and behind the last: all but the first are projections, of the same length as
    the first one."""

    def __init__(self, config: ModelConfig, lanes: int, build: Build) -> None:
        super().__init__()
        self.lanes, size, start = lanes, config.hidden_size, init_method(config)
        self.linear_in, self.linear_out = (
            nn.ModuleList(Linear(size, size, False, **build.gemm(start)) for _ in range(lanes - 1)) for _ in range(2)
        )

    def widened(self, x: Tensor) -> Tensor:
        """x: [B, S, H] -> its lanes [B, S, M H]."""
        return torch.cat([x, *(_as_long(linear(x), x) for linear in self.linear_in)], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, M H] -> the mean of its lanes, projected, [B, S, H]."""
        first, *others = x.unflatten(-1, (self.lanes, -1)).unbind(-2)
        projected = [_as_long(linear(lane), first) for linear, lane in zip(self.linear_out, others, strict=True)]
        return torch.stack([first, *projected]).mean(0)


def _as_long(x: Tensor, other: Tensor) -> Tensor:
    wanted = other.float().square().mean(-1, keepdim=True).sqrt()
    length = x.float().square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
    return (x.float() * (wanted / length)).to(x.dtype)
