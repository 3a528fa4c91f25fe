"""Mamba as a mixer (arXiv 2312.00752).

B batch, S sequence, H hidden, D channels of a rank, N states of a channel, R size of the latent of the time steps.
"""

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.norm import rms_norm
from te_models.kernels.state_space import selective_scan

from ...config import MambaConfig, ModelConfig
from ..build import Build, make_input_linear, make_output_linear
from .base import MixerInputs, RecurrentMixer
from .convolved import (
    HighPrecisionLinear,
    HighPrecisionRowParallel,
    convolved,
    silu_gated,
    softplus,
    start_convolution,
    start_rows,
    start_steps,
)
from .shared_sequence import shared_selective_scan


class Mamba(RecurrentMixer):
    """x through a short convolution with SiLU; the selective scan, whose steps, B and C are projected from x; a gate.

    `selection` and `step` are in high precision under every recipe.
    """

    def __init__(self, config: ModelConfig, mixer: MambaConfig, layer: int, build: Build) -> None:
        super().__init__()
        D, own = mixer.channels, mixer.channels // build.tp_size
        self.mixer, self.build = mixer, build
        self.epsilon = mixer.norm_epsilon or config.norm.layernorm_epsilon
        self.conv_weight = build.parameter(own, mixer.conv_kernel_size)
        self.conv_bias = build.parameter(own) if mixer.use_conv_bias else None
        self.A_log = build.parameter(own, mixer.state_size)
        self.D, self.dt_bias = build.parameter(own), build.parameter(own)
        self.dt_norm_weight = self.B_norm_weight = self.C_norm_weight = None
        if mixer.selection_norm == "with_weight":
            self.dt_norm_weight, self.B_norm_weight, self.C_norm_weight = map(build.parameter, mixer.selected)
        self.linear_in = make_input_linear(config, (D, D), mixer.use_bias, build, normed=False)
        self.selection = HighPrecisionRowParallel(config, sum(mixer.selected), D, build)
        self.step = HighPrecisionLinear(config, D, mixer.time_step_rank, build)
        self.linear_proj = make_output_linear(config, D, mixer.use_bias, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with decays and steps of many lengths; the projections have their own."""
        channels, N = (self.mixer.channels,), self.mixer.state_size
        start_convolution(self.conv_weight, self.conv_bias, channels, self.build)
        self.A_log.copy_(torch.arange(1, N + 1, device=self.A_log.device).log())
        start_rows(self.dt_bias, start_steps, channels, self.build)
        for weight in (self.D, self.dt_norm_weight, self.B_norm_weight, self.C_norm_weight):
            if weight is not None:
                weight.fill_(1.0)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        """As `Mixer`."""
        state, taps = (None, None) if cache is None else cache.read()
        rows = self.linear_in(x)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        value, gate = rows.chunk(2, -1)
        value, taps = convolved(value, inputs, self.conv_weight, self.conv_bias, "silu", taps, self.context_shard)
        mask = None if inputs.token_mask is None else inputs.token_mask[..., None]
        value = value if mask is None else value * mask.to(value.dtype)
        latent, B, C = self._selected(value)
        dt = softplus(self.step(latent).float() + self.dt_bias.float())
        dt = dt if mask is None else dt * mask
        A = -self.A_log.float().exp()
        D, documents = self.D.float(), inputs.documents
        if self.context_shard is None:
            y, state = selective_scan(value, dt, A, B, C, D, initial_state=state, documents=documents)
        else:
            y = shared_selective_scan(value, dt, A, B, C, D, documents, self.context_shard)
        if cache is not None:
            cache.write(state, taps)
        y = silu_gated(y, gate)
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))

    def _selected(self, value: Tensor) -> list[Tensor]:
        """value: [B, S, D] -> the latent of the time steps [B, S, R], B and C [B, S, N]."""
        parts = self.linear_proj.summed_for_all(self.selection(value)).split(self.mixer.selected, -1)
        if self.mixer.selection_norm == "none":
            return list(parts)
        weights = (self.dt_norm_weight, self.B_norm_weight, self.C_norm_weight)
        shared = (None if weight is None else self.linear_proj.for_own_features(weight) for weight in weights)
        return [rms_norm(part, weight, self.epsilon) for part, weight in zip(parts, shared, strict=True)]
