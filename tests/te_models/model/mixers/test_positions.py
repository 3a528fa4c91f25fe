"""Positions that are no rotation: biases by the distance (ALiBi), computed and offset vectors; normed embeddings."""

import math
from typing import Any

import pytest
import torch

from te_models import GPTModel, ModelConfig, generate
from te_models.config import AttentionConfig, ConfigError, EmbeddingConfig, MLPConfig
from te_models.layers.attention.mask import usual_slopes
from te_models.model.embedding import sinusoids
from te_models.model.mixers.attention import AlibiHeads


def model_of(kind: str, **changes: Any) -> GPTModel:
    embedding = {"position_embedding_type": kind, **changes.pop("embedding", {})}
    config = ModelConfig(
        vocab_size=61,
        hidden_size=48,
        num_layers=2,
        max_position_embeddings=32,
        attention=AttentionConfig(num_attention_heads=6, num_query_groups=2, **changes.pop("attention", {})),
        mlp=MLPConfig(ffn_hidden_size=40),
        embedding=EmbeddingConfig(**embedding),
        init_method_std=0.2,
        **changes,
    )
    torch.manual_seed(0)
    return GPTModel(config).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(length))


def test_biases_are_minus_the_distance_times_the_slope() -> None:
    scores = AlibiHeads(6, 0, 6).biases(5, torch.device("cpu"))
    slopes = torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0])
    assert torch.allclose(scores[0, :, 0], -slopes[:, None] * torch.tensor([4.0, 3, 2, 1, 0]), rtol=1e-6, atol=0)
    assert torch.equal(usual_slopes(6, torch.device("cpu")), slopes)


def test_ranks_have_the_slopes_of_their_own_heads() -> None:
    whole = AlibiHeads(6, 0, 6).biases(5, torch.device("cpu"))
    parts = [AlibiHeads(6, first, 2).biases(5, torch.device("cpu")) for first in (0, 2, 4)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("kind", ["alibi", "sinusoidal"])
@torch.no_grad()
def test_padding_and_documents_change_no_token(kind: str) -> None:
    model, ids = model_of(kind), tokens(9)
    alone = model(ids).logits
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[:, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(torch.nn.functional.pad(ids, (4, 0)), attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[:, 4:], alone, rtol=1e-4, atol=1e-5)
    numbers = torch.tensor([[0] * 9 + [1] * 9])
    row, places = ids.reshape(1, -1), torch.arange(9).repeat(2)[None]
    packed = model(row, document_ids=numbers, position_ids=places).logits
    torch.testing.assert_close(packed.view(2, 9, -1), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["alibi", "sinusoidal"])
@torch.no_grad()
def test_caches_of_both_kinds_give_the_same_text(kind: str) -> None:
    model, ids = model_of(kind, embedding={"layernorm": True}), tokens(7)
    text = generate(model, ids, 8)
    again = ids
    for _ in range(8):
        again = torch.cat([again, model(again).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(text, again)


def test_sinusoids_are_those_of_the_paper() -> None:
    found = sinusoids(torch.tensor([3]), 6)[0]
    angles = [3 * math.exp(-math.log(10000) * i / 2) for i in range(3)]
    expected = [*map(math.sin, angles), *map(math.cos, angles)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_learned_rows_before_the_first_position() -> None:
    model = model_of("learned_absolute", embedding={"position_offset": 2})
    assert model.embedding.position_embeddings.weight.shape == (34, 48)
    with pytest.raises(IndexError, match="at position 32; allowed: up to 31"):
        model(tokens(33))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention": {"window_size": 4}},
            "position_embedding_type is 'alibi'; allowed: another one with layer_types",
        ),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1; allowed: 0 with embedding.layernorm, or positions"),
        ({"embedding": {"position_offset": 2}}, "position_offset is 2; allowed: 0 without a vector"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of("alibi", **changes)
