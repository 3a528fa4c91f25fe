"""Mixtures that a run defines are balanced, and a collapse is told once."""

from pathlib import Path

import pytest
import torch

from te_models.model.moe.expert_bias import COLLAPSED_STEPS as STEPS
from te_models.model.moe.expert_bias import CollapseWatch, ExpertLoad
from te_models.training.config.file import BALANCE, read_config

MODEL = """
[model.config]
vocab_size = 64
hidden_size = 32
num_layers = 2
max_position_embeddings = 64
attention = {{ num_attention_heads = 4 }}
mlp = {{ ffn_hidden_size = 64 }}
moe = {{ num_moe_experts = 4, moe_router_topk = 2, moe_ffn_hidden_size = 32{} }}
"""
RUN = """
output_dir = "run"
steps = 2
data = { path = "data", sequence_length = 16 }
"""


@pytest.mark.parametrize(
    ("router", "coefficient"),
    [
        ("", BALANCE),
        (", router = { score = 'sigmoid' }", BALANCE),
        (", aux_loss_coeff = 0.0", 0.0),
        (", aux_loss_coeff = 0.5", 0.5),
        (", router = { score = 'sigmoid', expert_bias = true }", 0.0),
    ],
)
def test_mixtures_of_toml_are_balanced_unless_they_say(router: str, coefficient: float, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN + MODEL.format(router))
    config = read_config(file, [])
    assert config.model.config.moe.aux_loss_coeff == coefficient
    again = type(config).from_dict(config.to_dict())  # as a checkpoint keeps it
    assert again == config


def load(*tokens: list[int]) -> ExpertLoad:
    return ExpertLoad(torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.int64))


BALANCED, IDLE, FEW = [25, 25, 25, 25], [50, 50, 0, 0], [49, 49, 1, 1]


@pytest.mark.parametrize(
    ("collapsed", "what"), [(IDLE, "2 of its 4 experts get no token"), (FEW, "a few get them all")]
)
def test_a_collapse_is_told_once_with_the_key(collapsed: list[int], what: str) -> None:
    watch = CollapseWatch(topk=2, experts=4)
    said = [watch.step(load(BALANCED, collapsed)) for _ in range(3 * STEPS)]
    (sentence,) = filter(None, said)
    assert said.index(sentence) == STEPS - 1
    assert "MoE layer 1" in sentence and what in sentence and "moe.aux_loss_coeff = 0.01" in sentence


def test_what_recovers_or_cannot_collapse_is_not_told() -> None:
    watch = CollapseWatch(topk=2, experts=4)
    steps = ([IDLE] * (STEPS - 1) + [BALANCED]) * 3
    assert not any(watch.step(load(step)) for step in steps)
    everything = CollapseWatch(topk=4, experts=4)
    assert not any(everything.step(load(BALANCED)) for _ in range(2 * STEPS))
