"""A model that is read from files is built without drawing values first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from te_models import GPTModel
from te_models.config import AttentionConfig, MLPConfig, ModelConfig
from te_models.layers import MXFP8BlockScaling, Recipe

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=64),
)


@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()], ids=["plain", "mxfp8"])
def test_from_pretrained_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe | None) -> None:
    model = GPTModel(CONFIG)
    model.save_pretrained(tmp_path / "model")

    def draw(*_: object, **__: object) -> Tensor:
        raise AssertionError("random values are drawn for a model that is read")

    monkeypatch.setattr(torch.nn.init, "normal_", draw)
    monkeypatch.setattr(Tensor, "normal_", draw)
    generator = torch.get_rng_state()
    read = GPTModel.from_pretrained(tmp_path / "model", recipe=recipe)
    assert torch.equal(torch.get_rng_state(), generator)
    if recipe is None:
        assert all(torch.equal(a, b) for a, b in zip(read.parameters(), model.parameters(), strict=True))
