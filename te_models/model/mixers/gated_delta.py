"""The gated delta rule as a mixer: GDN (arXiv 2412.06464) and KDA (arXiv 2510.26692).

B batch, S sequence, H hidden, N value heads of a rank, K and V channels of a head.
"""

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.gated_delta import gated_delta_rule, l2_normed
from te_models.kernels.norm import rms_norm

from ...config import GatedDeltaConfig, ModelConfig
from ..build import Build, make_input_linear, make_output_linear
from .base import MixerInputs, RecurrentMixer
from .convolved import HighPrecisionLinear, all_tokens, convolved, silu_gated, softplus, start_convolution, start_rows
from .shared_sequence import shared_delta_rule


class GatedDelta(RecurrentMixer):
    """q, k and v through a short convolution with SiLU, q and k of length 1; a state that forgets by a decay and
    corrects what it holds by a step, both projected from the input; a norm of each head's output and a gate."""

    def __init__(self, config: ModelConfig, mixer: GatedDeltaConfig, layer: int, build: Build) -> None:
        super().__init__()
        ranks, hidden = build.tp_size, config.hidden_size
        self.mixer, self.build = mixer, build
        self.key_size, self.value_size = mixer.key_size // ranks, mixer.value_size // ranks
        self.epsilon = mixer.norm_epsilon or config.norm.layernorm_epsilon
        self.conv_weight = build.parameter(2 * self.key_size + self.value_size, mixer.conv_kernel_size)
        self.A_log = build.parameter(mixer.num_value_heads // ranks)
        self.dt_bias = build.parameter(mixer.decay_size // ranks)
        self.norm_weight = build.parameter(mixer.value_head_dim)
        self.linear_in = make_input_linear(config, mixer.joined, False, build, normed=False)
        self.step = HighPrecisionLinear(config, mixer.num_value_heads, hidden, build)
        rank, gate_rank = mixer.decay_lora_rank, mixer.gate_lora_rank
        self.decay_down = None if rank is None else HighPrecisionLinear(config, rank, hidden, build, whole=True)
        self.decay = HighPrecisionLinear(config, mixer.decay_size, rank or hidden, build)
        self.gate_down = (
            None if gate_rank is None else HighPrecisionLinear(config, gate_rank, hidden, build, whole=True)
        )
        self.gate = None if gate_rank is None else HighPrecisionLinear(config, mixer.value_size, gate_rank, build)
        self.linear_proj = make_output_linear(config, mixer.value_size, False, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with decays of many lengths; the projections have their own."""
        mixer, K, V = self.mixer, self.mixer.key_size, self.mixer.value_size
        start_convolution(self.conv_weight, None, (K, K, V), self.build)
        start_rows(self.A_log, lambda x: x.uniform_(0.01, 16).log_(), (mixer.num_value_heads,), self.build)
        for x in (self.dt_bias, self.norm_weight):
            x.fill_(1.0)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        """As `Mixer`."""
        state, taps = (None, None) if cache is None else cache.read()
        rows = self.linear_in(x)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        tokens = all_tokens(x, inputs, self.build.sequence_shard)
        whole = self.linear_proj.for_own_features(tokens)
        mixed, taps = convolved(
            rows[..., : 2 * self.key_size + self.value_size],
            inputs,
            self.conv_weight,
            None,
            "silu",
            taps,
            self.context_shard,
        )
        q, k, v = mixed.split([self.key_size, self.key_size, self.value_size], -1)
        q, k = (l2_normed(t.unflatten(-1, (-1, self.mixer.key_head_dim))) for t in (q, k))
        g, beta = self._decay_and_step(whole, self._latent(self.decay_down, tokens), inputs.token_mask)
        v = v.unflatten(-1, (-1, self.mixer.value_head_dim))
        if self.context_shard is not None:
            y = shared_delta_rule(q, k, v, g, beta, inputs.documents, self.context_shard)
        else:
            y, state = gated_delta_rule(q, k, v, g, beta, initial_state=state, documents=inputs.documents)
        if cache is not None:
            cache.write(state, taps)
        y = rms_norm(y, self.linear_proj.for_own_features(self.norm_weight), self.epsilon).flatten(2)
        latent = self._latent(self.gate_down, tokens)
        gate = rows[..., -self.value_size :] if self.gate is None or latent is None else self.gate(latent)
        y = silu_gated(y, gate, self.mixer.gate_activation)
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))

    def _latent(self, down: HighPrecisionLinear | None, tokens: Tensor) -> Tensor | None:
        """Return a latent, which every rank has in full and goes on from to its own heads; None where there is none."""
        return None if down is None else self.linear_proj.for_own_features(down(tokens))

    def _decay_and_step(self, x: Tensor, latent: Tensor | None, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the log of the decay, [B, S, N] or [B, S, N, K], and the step [B, S, N], float32; 0 for padding."""
        mixer = self.mixer
        beta = self.step(x).float().sigmoid() * (2.0 if mixer.allow_neg_eigval else 1.0)
        a = self.decay(x if latent is None else latent).float() + self.dt_bias.float()
        rate = self.A_log.float().exp()
        if mixer.decay_by == "channel":
            a, rate = a.unflatten(-1, (-1, mixer.key_head_dim)), rate[:, None]
        bound = mixer.decay_lower_bound
        g = -rate * softplus(a) if bound is None else bound * (rate * a).sigmoid()
        if token_mask is not None:
            beta = beta * token_mask[..., None]
            g = g * (token_mask[..., None] if g.dim() == 3 else token_mask[..., None, None])
        return g, beta
