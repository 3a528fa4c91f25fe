"""Lightning attention as a mixer (arXiv 2401.04658; arXiv 2501.08313).

B batch, S sequence, H hidden, N heads of a rank, D channels of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.linear_attention import linear_attention
from te_models.kernels.norm import rms_norm, rms_norm_by

from ...config import LightningConfig, ModelConfig
from ..build import Build, make_input_linear, make_output_linear
from ..constants import ConstantModule
from .base import MixerInputs, RecurrentMixer
from .shared_sequence import shared_linear_attention


class Slopes(ConstantModule):
    """The negative logs of the decays of a rank's heads, `slopes` [N], float32."""

    slopes: Tensor

    def __init__(self, slopes: list[float], build: Build) -> None:
        super().__init__()
        own, rank = len(slopes) // build.tp_size, 0 if build.tp_group is None else build.tp_group.rank()
        self.own = slopes[rank * own : (rank + 1) * own]
        self.register_constants(build.device)

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        return {"slopes": torch.tensor(self.own, dtype=torch.float32, device=device)}


class Lightning(RecurrentMixer):
    """q, k and v, each with SiLU; a state that forgets by a fixed decay; a norm over all heads, and a sigmoid gate."""

    def __init__(self, config: ModelConfig, mixer: LightningConfig, layer: int, build: Build) -> None:
        super().__init__()
        self.mixer, self.ranks, D = mixer, build.tp_size, mixer.size
        self.size = D // build.tp_size
        self.norm_weight = build.parameter(self.size)
        self.decay = Slopes(mixer.slopes(layer, config.num_layers), build)
        self.linear_in = make_input_linear(config, (D,) * 4, False, build, normed=False)
        self.linear_proj = make_output_linear(config, D, False, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with a norm without effect; the projections have their own."""
        self.norm_weight.fill_(1.0)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        """As `Mixer`."""
        (state,) = (None,) if cache is None else cache.read()
        rows = self.linear_in(x)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        mixed, gate = F.silu(rows[..., : 3 * self.size]), rows[..., 3 * self.size :]
        g = -self.decay.slopes.expand(*mixed.shape[:2], -1)
        if inputs.token_mask is not None:
            mask = inputs.token_mask[..., None]
            mixed, g = mixed * mask.to(mixed.dtype), g * mask
        q, k, v = (part.unflatten(-1, (-1, self.mixer.head_dim)) for part in mixed.chunk(3, -1))
        if self.context_shard is None:
            y, state = linear_attention(q, k, v, g, initial_state=state, documents=inputs.documents)
        else:
            y = shared_linear_attention(q, k, v, g, inputs.documents, self.context_shard)
        if cache is not None:
            cache.write(state)
        y = self._normed(y.flatten(2)) * gate.sigmoid()
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))

    def _normed(self, y: Tensor) -> Tensor:
        """y: [B, S, N D], normed over the heads of all ranks."""
        if self.ranks == 1:
            return rms_norm(y, self.norm_weight, self.mixer.norm_epsilon)
        squares = self.linear_proj.summed_for_all(y.float().square().sum(-1, keepdim=True))
        return rms_norm_by(squares / self.mixer.size, y, self.norm_weight, self.mixer.norm_epsilon)
