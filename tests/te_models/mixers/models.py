"""One small model of every mixer, for what all of them have."""

from __future__ import annotations

import torch

from te_models import GPTModel, ModelConfig
from tests.te_models.configs import VARIANTS
from tests.te_models.mixers.test_recurrent_mixers import MIXERS, close, hybrid
from tests.te_models.model.mixers.test_index_pools import MODELS as POOLS

MODELS: dict[str, ModelConfig] = {
    **{name: hybrid(name) for name in MIXERS},
    "sparse": VARIANTS["sparse"].replace(num_layers=3, layer_types=None),
    "sparse_latent": VARIANTS["sparse_latent"].replace(num_layers=3, layer_types=None),
    "pools": POOLS["hybrid"],
}
__all__ = ["MIXERS", "MODELS", "close", "model_of"]


def model_of(name: str) -> GPTModel:
    """Equal in every process, with weights with which states and choices matter."""
    torch.manual_seed(0)
    model = GPTModel(MODELS[name]).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15)
    return model
