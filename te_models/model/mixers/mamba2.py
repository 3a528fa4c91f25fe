"""Mamba-2 as a mixer (arXiv 2405.21060).

B batch, S sequence, H hidden, N heads of a rank, P channels of a head, G groups of a rank.

Where ranks that split a layer are more than its groups, each has a part of the rows of B and C, and the heads of one
group: it gathers the rows of that group behind the convolution, and sums squares for the norm over the group's ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.norm import rms_norm, rms_norm_by
from te_models.kernels.state_space import state_space_scan

from ...config import Mamba2Config, ModelConfig
from ..build import Build, make_input_linear, make_output_linear
from .base import MixerInputs, RecurrentMixer
from .convolved import convolved, silu_gated, softplus, start_convolution, start_rows, start_steps
from .shared_sequence import shared_state_space_scan


class Mamba2(RecurrentMixer):
    """x, B and C through a short convolution with SiLU; the scan, whose steps are projected from the input; a norm of
    each group's output, and a gate."""

    def __init__(self, config: ModelConfig, mixer: Mamba2Config, layer: int, build: Build) -> None:
        super().__init__()
        ranks = build.tp_size
        self.mixer, self.build = mixer, build
        self.size, self.heads = mixer.size // ranks, mixer.num_heads // ranks
        self.groups, self.sharing = max(1, mixer.num_groups // ranks), max(1, ranks // mixer.num_groups)
        self.group = 0 if build.tp_group is None else build.tp_group.rank() // self.sharing
        self.sizes = [n // ranks for n in mixer.convolved]
        self.epsilon = mixer.norm_epsilon or config.norm.layernorm_epsilon
        self.conv_weight = build.parameter(sum(self.sizes), mixer.conv_kernel_size)
        self.conv_bias = build.parameter(sum(self.sizes)) if mixer.use_conv_bias else None
        self.A_log, self.D, self.dt_bias = (build.parameter(self.heads) for _ in range(3))
        self.norm_weight = build.parameter(self.size) if mixer.gate != "no_norm" else None
        self.linear_in = make_input_linear(config, mixer.rows, mixer.use_bias, build, normed=False)
        self.linear_proj = make_output_linear(config, mixer.size, mixer.output_bias, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with decays and steps of many lengths; the projections have their own."""
        heads = (self.mixer.num_heads,)
        start_convolution(self.conv_weight, self.conv_bias, self.mixer.convolved, self.build)
        start_rows(self.A_log, lambda x: x.copy_(_numbers(x).log()), heads, self.build)
        start_rows(self.dt_bias, start_steps, heads, self.build)
        self.D.fill_(1.0)
        if self.norm_weight is not None:
            self.norm_weight.fill_(1.0)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        """As `Mixer`."""
        state, taps = (None, None) if cache is None else cache.read()
        rows = self.linear_in(x if self.mixer.input_multiplier == 1.0 else x * self.mixer.input_multiplier)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        if self.mixer.row_multipliers is not None:
            sizes = [n // self.build.tp_size for n in self.mixer.rows]
            parts = zip(rows.split(sizes, -1), self.mixer.row_multipliers, strict=True)
            rows = torch.cat([part * factor for part, factor in parts], -1)
        gate, mixed, dt = rows.split([self.size, sum(self.sizes), self.heads], -1)
        mixed, taps = convolved(mixed, inputs, self.conv_weight, self.conv_bias, "silu", taps, self.context_shard)
        if inputs.token_mask is not None:
            mixed = mixed * inputs.token_mask[..., None].to(mixed.dtype)
        value, B, C = mixed.split(self.sizes, -1)
        if self.sharing > 1:
            each = self.linear_proj.features_of_ranks(torch.cat((B, C), -1), tuple(self.sizes[1:]))
            B, C = (t.narrow(-1, self.group * self.mixer.state_size, self.mixer.state_size) for t in each)
        value = value.unflatten(-1, (self.heads, -1))
        B, C = (t.unflatten(-1, (self.groups, -1)) for t in (B, C))
        dt = softplus(dt.float() + self.dt_bias.float()).clamp(self.mixer.time_step_low, self.mixer.time_step_high)
        if inputs.token_mask is not None:
            dt = dt * inputs.token_mask[..., None]
        A = -self.A_log.float().exp()
        D, documents = self.D.float(), inputs.documents
        if self.context_shard is not None:
            y = shared_state_space_scan(value, dt, A, B, C, D, documents, self.context_shard)
        else:
            y, state = state_space_scan(value, dt, A, B, C, D, initial_state=state, documents=documents)
        if cache is not None:
            cache.write(state, taps)
        y = self._gated(y.flatten(2), gate)
        y = self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))
        return y if self.mixer.output_multiplier == 1.0 else y * self.mixer.output_multiplier

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate: [B, S, N P]. The norm is over each group's channels."""
        if self.norm_weight is None:
            return silu_gated(y, gate)
        before = self.mixer.gate == "before_norm"
        wide = y.float() * F.silu(gate.float()) if before else y.float()
        if self.sharing > 1:
            (squares,) = self.linear_proj.features_of_ranks(wide.square().sum(-1, keepdim=True), (1,))
            squares = squares.narrow(-1, self.group * self.sharing, self.sharing).sum(-1, keepdim=True)
            normed = rms_norm_by(squares / (self.sharing * self.size), wide, None, self.epsilon)
        else:
            normed = rms_norm(wide.unflatten(-1, (self.groups, -1)), None, self.epsilon).flatten(-2)
        y = self.norm_weight * normed.to(y.dtype)
        return y if before else silu_gated(y, gate)


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[0] + 1, device=x.device, dtype=torch.float32).view_as(x)
