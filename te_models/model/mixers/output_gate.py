"""The gate before attention's output projection (arXiv 2505.06708), activated, and its projection where heads have one.

B batch, S sequence, H hidden, N heads of a rank, Dv value channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.gemm import linear
from te_models.kernels.without_autocast import compute_dtype, without_autocast
from te_models.layers.distributed.sequence_parallel import gather_tokens_of_ranks
from te_models.layers.distributed.tensor_parallel import TensorParallelModule

from ...config import AttentionConfig, ModelConfig
from ..build import Build, init_method


class HeadGate(nn.Module):
    """A projection of the normed input to one number for each head. weight: [N, H]. In high precision under every
    recipe, as a router: its rows are fewer than a block of most formats."""

    def __init__(self, config: ModelConfig, heads: int, build: Build) -> None:
        super().__init__()
        self.init_method = build.starting_rows(init_method(config), heads)
        self.sequence_shard = build.sequence_shard
        self.weight = build.parameter(heads // build.tp_size, config.hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again."""
        self.init_method(self.weight)

    def forward(self, x: Tensor, batch_size: int | None, split: TensorParallelModule) -> Tensor:
        """x: [B, S, H], normed; of a rank's tokens alone where batch_size says B -> [B, S, N]. split: a layer that the
        same ranks share."""
        if batch_size is not None and self.sequence_shard is not None:
            x = gather_tokens_of_ranks(x, self.sequence_shard).unflatten(0, (batch_size, -1))
        dtype = compute_dtype(x)
        x = split.for_own_features(x.to(dtype))
        with without_autocast(x):
            return linear(x, self.weight.to(dtype), None)


def gated(y: Tensor, gate: Tensor, a: AttentionConfig) -> Tensor:
    """y: [B, S, N Dv]; gate: [B, S, N Dv] or [B, S, N], before its activation -> [B, S, N Dv]."""
    gate = gate.sigmoid() if a.output_gate_activation == "sigmoid" else F.softplus(gate.float()).to(gate.dtype)
    if a.output_gate_by == "channel":
        return y * gate
    return (y.unflatten(-1, (gate.shape[-1], -1)) * gate[..., None]).flatten(-2)
