"""Sparse attention whose indexer chooses pools of tokens, beside a delta rule and lanes, as in GLM-5 Flash."""

import pytest
import torch
from torch import Tensor

from te_models import EmbeddingConfig, GPTModel, ModelConfig, generate
from te_models.checkpoints import expected_tensors
from te_models.config import ConfigError, GatedDeltaConfig, HyperConnectionConfig, IndexerConfig, MLAConfig
from te_models.layers import MXFP8BlockScaling, autocast
from te_models.model.mixers.index_pools import choose_pools, pooled_keys
from tests.build import LATENT, tiny, token_ids
from tests.compare import assert_decodes
from tests.te_models.model.mixers.test_sparse_attention import attention, close, model_of

POOLED = IndexerConfig(n_heads=6, head_dim=9, topk=6, rotated="none", pool_size=3)


def hybrid() -> ModelConfig:
    """Latent attention without positions, one layer sharing the choice of the one before."""
    mla, base = MLAConfig(**LATENT | {"qk_pos_emb_head_dim": 0}, q_lora_rank=12), attention("latent", POOLED)
    attends = base.replace(mla=mla, kv_channels=None)
    delta = GatedDeltaConfig(num_key_heads=2, num_value_heads=2, key_head_dim=8, value_head_dim=8, decay_by="channel")
    return tiny(
        attention=attends,
        num_layers=4,
        mixers={"delta": delta, "shared": attends.replace(indexer=IndexerConfig(topk=6, shared=True))},
        layer_mixers=("attention", "shared", "delta", "attention"),
        hyper_connections=HyperConnectionConfig(lanes=2, output="mean"),
        embedding=EmbeddingConfig(position_embedding_type="none"),
    )


MODELS = {"grouped": tiny(attention=attention("grouped", POOLED)), "hybrid": hybrid()}
each = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> GPTModel:
    model = model_of(MODELS[name])
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "pool_bias" in key:
                p.normal_()
    return model


def by_definition(bias: Tensor, q: Tensor, k: Tensor, weights: Tensor, pools: int) -> list[set[int]]:
    """The tokens that each query of one text sees, pool by pool."""
    size, (keys, gates) = bias.shape[0], k.chunk(2, -1)
    whole = [keys[p : p + size] for p in range(0, len(keys) - size + 1, size)]
    logits = [gates[p : p + size] + bias for p in range(0, len(keys) - size + 1, size)]
    means = [(x.softmax(0) * y).sum(0) for x, y in zip(logits, whole)]
    found = []
    for t in range(len(q)):
        seen = range((t + 1) // size)
        scores = torch.tensor([float((weights[t] * (q[t] @ means[p]).relu()).sum()) for p in seen])
        best = scores.argsort(descending=True, stable=True)[:pools].tolist()
        tokens = {token for p in best for token in range(p * size, (p + 1) * size)}
        found.append(tokens | set(range((t + 1) // size * size, t + 1)))
    return found


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("left", [0, 5])
def test_the_choice_is_that_of_the_definition(size: int, left: int) -> None:
    bias, q, k, weights = torch.randn(size, 5), torch.randn(1, 31, 4, 5), torch.randn(1, 31, 10), torch.randn(1, 31, 4)
    hidden = None if left == 0 else (torch.arange(31) < left)[None, None]
    choice = choose_pools(bias, q, k, weights, 2, hidden)
    assert choice.dtype == torch.int32 and choice.shape == (1, 31, 2 * size + size - 1)
    wanted = by_definition(bias, q[0, left:], k[0, left:], weights[0, left:], 2)
    for t, tokens in enumerate(wanted, left):
        seen = [token for token in choice[0, t].tolist() if token >= 0]
        assert len(seen) == len(set(seen)) and set(seen) == {left + token for token in tokens}
    choice = choose_pools(bias, q, k, weights, 2, torch.tensor([0] * 13 + [1] * 18)[None])
    for t, tokens in enumerate(by_definition(bias, q[0, 13:], k[0, 13:], weights[0, 13:], 2), 13):
        assert {token for token in choice[0, t].tolist() if token >= 0} == {13 + token for token in tokens}


def test_weights_in_a_pool_do_not_overflow() -> None:
    keys, gates = torch.randn(1, 6, 4), torch.full((1, 6, 4), 1e4)
    torch.testing.assert_close(pooled_keys(keys, gates, torch.zeros(3, 4))[0, 5], keys[0, 3:].mean(0))
    with pytest.raises(ValueError, match="keys are hidden from 2 queries one by one, of 6 keys"):
        rows = torch.ones(1, 2, 1), 1, torch.zeros(1, 2, 6).bool()
        choose_pools(torch.zeros(3, 4), torch.ones(1, 2, 1, 4), torch.ones(1, 6, 8), *rows)


@each
@torch.no_grad()
def test_decoding_is_the_whole_sequence(name: str) -> None:
    model, ids = made(name), token_ids(2, 26)
    assert {key: tuple(p.shape) for key, p in model.named_parameters()} == expected_tensors(model.config)
    assert ModelConfig.from_json(model.config.to_json()) == model.config
    whole = model(ids).logits
    assert not torch.equal(whole[:, :7], model_of(MODELS[name].replace(init_method_std=0.1))(ids).logits[:, :7])
    assert_decodes(model, ids, prompt=9)


@each
@torch.no_grad()
def test_padding_and_documents_change_nothing(name: str) -> None:
    model, ids = made(name), token_ids(1, 30)
    wanted = generate(model, ids[:, :17], 8)
    padded = torch.cat((torch.zeros(1, 4, dtype=ids.dtype), ids[:, :17]), 1)
    mask = torch.ones_like(padded).index_fill(1, torch.arange(4), 0)
    assert torch.equal(generate(model, padded, 8, attention_mask=mask)[:, 4:], wanted)
    found = model(ids, document_ids=torch.tensor([[0] * 13 + [1] * 17])).logits
    close(found[:, :13], model(ids[:, :13]).logits)
    close(found[:, 13:], model(ids[:, 13:]).logits)


@pytest.mark.slow
@each
@torch.no_grad()
def test_one_graph_decodes(name: str) -> None:
    model, ids = made(name), token_ids(2, 9)
    assert torch.equal(generate(model, ids, 10, compile=True), generate(model, ids, 10))


@pytest.mark.slow
@each
def test_training_in_one_graph(name: str) -> None:
    model, ids, found = made(name).train(), token_ids(2, 24), []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with autocast(recipe=MXFP8BlockScaling()):
            loss = run(ids, labels=ids, return_logits=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert all((p.grad is None) == ("indexer" in key) for key, p in model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_size": 4}, "indexer.pool_size is 4; allowed: a divisor of topk = 6, or null"),
        ({"pool_size": 0}, "indexer.pool_size is 0; allowed: a divisor of topk = 6, or null"),
        ({"loss_coeff": 0.1}, "indexer.pool_size is 3; allowed: null with shared, loss_coeff or warmup"),
    ],
)
def test_what_pools_do_not_do(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        POOLED.replace(**changes)
