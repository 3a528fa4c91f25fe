"""Two ranks that share tokens, between split layers or along the sequence, are the model of one rank: loss, router
losses, logits and gradients."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_models import AttentionConfig, ConfigError, GPTModel, KVCache, RouterRecord, compile_model, logprobs
from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.config import EmbeddingConfig, Mamba2Config
from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from te_models.layers.distributed.vocab_parallel import vocab_range
from tests.build import FURTHER, VARIANTS, tiny, token_ids
from tests.compare import close
from tests.ranks import on_ranks
from tests.te_models.mixers.test_recurrent_mixers import hybrid
from tests.te_models.mixers.test_shared_sequences import size_of


def test_each_position_and_each_word_is_of_one_rank() -> None:
    """And the ranks see equally many keys under a causal mask."""
    positions = torch.arange(24)[None]
    own = [own_positions(positions, ContextShard(rank, 3, "")) for rank in range(3)]
    assert [each.tolist() for each in own[:1]] == [[[0, 1, 2, 3, 20, 21, 22, 23]]]
    assert torch.equal(torch.cat(own, 1).sort().values, positions)
    assert len({int((each + 1).sum()) for each in own}) == 1
    for words, ranks in ((61, 2), (10, 4), (4, 4), (257, 8)):
        ends = [vocab_range(words, rank, ranks) for rank in range(ranks)]
        assert [w for begin, end in ends for w in range(begin, end)] == list(range(words))
        assert {end - begin for begin, end in ends} <= {words // ranks, -(-words // ranks)}


LENGTH = {"sp": 8, "tp": 7, "cp": 16, "p2p": 16, "a2a": 16}
ONE_GROUP: dict[str, Any] = {"num_attention_heads": 4, "num_query_groups": 1}
SHARED_GROUPS = {
    "one_group": tiny(attention=AttentionConfig(**ONE_GROUP, qk_layernorm="head", sinks=True, v_head_dim=12)),
    "one_group_biases": tiny(attention=AttentionConfig(**ONE_GROUP, add_qkv_bias=True, value_layernorm=True)),
    "one_group_gated": tiny(attention=AttentionConfig(**ONE_GROUP, add_qkv_bias=True, output_gate=True)),
    "one_group_moe": VARIANTS["moe"].replace(attention=AttentionConfig(**ONE_GROUP, clip_qkv=1.0)),
    **{name: hybrid(name) for name in ("mamba2", "in_shared_blocks")},
    "mamba2_one_group": hybrid("mamba2").replace(
        mixers={"recurrent": Mamba2Config(num_heads=4, head_dim=8, state_size=8, gate="after_norm")}
    ),
}
"""Models with fewer groups than ranks: heads of keys and values, B and C of Mamba-2."""
TRAINED = {
    f"{name}_{how}": VARIANTS[name].replace(
        attention=VARIANTS[name].attention.replace(
            indexer=VARIANTS[name].attention.indexer.replace(loss_coeff=0.5, warmup=how == "warmed")
        )
    )
    for name in ("sparse", "sparse_latent")
    for how in ("trained", "warmed")
}
"""Models whose indexers are trained."""
FLAT = tiny(embedding=EmbeddingConfig(position_embedding_type="alibi"), num_layers=1)
"""Scores that are lower by the distance of the key, which `VARIANTS` has not."""


def pair(kind: str, variant: str) -> tuple[GPTModel, GPTModel]:
    """The whole model, and the one whose ranks share tokens, of the same values."""
    config, options = (VARIANTS | FURTHER | SHARED_GROUPS | TRAINED | {"alibi": FLAT})[variant], {}
    if variant == "dynamic_rope":  # longer sequences than in the first training, on which the frequencies depend
        config = config.replace(max_position_embeddings=8)
    if kind in ("sp", "tp"):
        options = {"tp_group": dist.group.WORLD, "sequence_parallel": kind == "sp"}
    models = []
    for its in ({}, options):
        torch.manual_seed(0)
        models.append(GPTModel(config, **its))
    if kind in ("cp", "p2p", "a2a"):
        models[1].set_context_parallel_group(dist.group.WORLD, "all_gather" if kind == "cp" else kind)
    return models[0], models[1]


def wrong_gradients(kind: str, whole: GPTModel, shared: GPTModel) -> list[str]:
    """Return the names of parameters whose gradients are not the whole model's, and how far off they are, by what the
    largest number of the whole one is. All ranks say so where one of them finds any: the others wait for it."""
    owned = parts(
        whole.config, expected_tensors(whole.config), ShardPlace(tp_rank=dist.get_rank(), tp_size=dist.get_world_size())
    )
    expected, wrong = {name: p.grad for name, p in whole.named_parameters()}, []
    for name, parameter in shared.named_parameters():
        right, part = expected[name], owned[name]
        if right is None:  # of an indexer that no loss trains
            assert parameter.grad is None and "index" in name
            continue
        if kind in ("cp", "p2p", "a2a"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        elif part.dim is not None:
            right = torch.cat([right.narrow(part.dim, begin, end - begin) for begin, end in part.ranges], part.dim)
        error = float((parameter.grad - right).abs().max() / size_of(name, expected).clamp(min=1e-3))
        if error > 2e-5:
            wrong.append(f"{name}: {error:.1e}")
    failed = torch.tensor([float(len(wrong))])
    dist.all_reduce(failed)
    return wrong if wrong or not failed.any() else ["another rank's"]


REFUSED = {("sp", "alternating_updates"), ("sp", "sparse_gates"), ("sp", "compressed"), ("cp", "compressed")}
REFUSED |= {(way, name) for way in ("p2p", "a2a") for name in ("compressed", "sparse", "sparse_latent", "sparse_gates")}
GROUPS = ("one_group", "one_group_biases", "one_group_gated", "one_group_moe", "mamba2_one_group")
MODELS = [(kind, name) for kind in ("sp", "cp", "p2p", "a2a") for name in VARIANTS | FURTHER]
MODELS = [*(model for model in MODELS if model not in REFUSED), ("p2p", "alibi"), ("a2a", "alibi")]
MODELS += [(kind, name) for name in (*GROUPS, *TRAINED) for kind in ("tp", "sp")]
ON_FOUR = [
    (way, name) for way in ("p2p", "a2a") for name in ("mixed_layers", "sinks_clip", "softcaps", "latent", "moe")
]
ON_FOUR += [(way, name) for way in ("p2p", "a2a") for name in ("chunked_l2_temperature", "gated_heads", "alibi")]
ON_FOUR += [
    (way, name) for way in ("p2p", "a2a") for name in ("several_attentions", "keys_of_earlier_layers", *FURTHER)
]
ON_FOUR += [("tp", name) for name in ("dense", "sinks_clip", "gated_channels", "mamba2", *GROUPS, *TRAINED)]
ON_FOUR += [("sp", name) for name in ("gated_heads", "value_width", "mamba2_one_group", "sparse_trained")]


@on_ranks(2)
@pytest.mark.sentinels(
    "sp-sandwich",
    "sp-moe_shared",
    "cp-mixed_layers",
    "cp-latent",
    "cp-moe_ahead",
    "p2p-chunked_l2_temperature",
    "p2p-sinks_clip",
    "a2a-latent",
    "a2a-alibi",
    "sp-one_group_biases",
    "tp-mamba2_one_group",
    "sp-sparse_latent_trained",
)
@pytest.mark.parametrize(("kind", "variant"), MODELS)
def test_two_ranks_are_the_whole_model(kind: str, variant: str) -> None:
    is_the_whole_model(kind, variant)


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variant"), ON_FOUR)
def test_four_ranks_are_the_whole_model(kind: str, variant: str) -> None:
    """More ranks than groups of keys, and than groups of Mamba-2."""
    is_the_whole_model(kind, variant)


def is_the_whole_model(kind: str, variant: str) -> None:
    """Without padding, with padding, with two texts in a row, as a mask and as numbers of documents, padded as well;
    with activation checkpoints and without."""
    whole, shared = pair(kind, variant)
    length = LENGTH[kind]
    ids = token_ids(2, length)
    padded, texts = torch.ones_like(ids), torch.ones(2, length, length, dtype=torch.bool)
    padded[0, :2], texts[:, 5:, :5] = 0, False
    documents = (torch.arange(length) >= 5).long().repeat(2, 1)
    documents[1, :2] = -1
    some = texts.clone()
    some[1, :2], some[1, :, :2] = False, False
    for number, mask in enumerate((None, padded, texts, some, documents)):
        whole.zero_grad()
        shared.zero_grad()
        shared.activation_checkpointing = number > 0
        told = {"document_ids" if mask is documents else "attention_mask": mask}
        expected = whole(ids, labels=ids, **told)
        expected.loss.backward()
        found = shared(ids, labels=ids, **told, return_logits=number > 0)
        found.loss.backward()
        assert close(found.loss, expected.loss)
        assert found.logits is None or close(found.logits, expected.logits)
        for name in ("aux_loss", "mtp_loss"):
            value = getattr(expected, name)
            assert value is None or close(getattr(found, name), value), name
        assert not (wrong := wrong_gradients(kind, whole, shared)), wrong


@on_ranks(2)
@pytest.mark.sentinels("sp-moe_shared", "cp-moe", "tp-softcaps")
@pytest.mark.parametrize(("kind", "variant"), [("sp", "moe_shared"), ("cp", "moe"), ("tp", "softcaps")])
def test_log_probabilities(kind: str, variant: str) -> None:
    """Of the labels of packed rows and of a padded one, with gradients; experts are those of a record."""
    whole, shared = pair(kind, variant)
    for model in (whole, shared):
        model.eval()
    ids = token_ids(2, 16)
    documents = (torch.arange(16) >= 5).long().repeat(2, 1)
    documents[1, :2] = -1
    with contextlib.ExitStack() as opened:
        if whole.config.moe is not None:
            record = RouterRecord()
            with record.recording(whole), torch.no_grad():
                whole(ids.flip(0))
            for model in (whole, shared):
                opened.enter_context(record.replaying(model))
        factor = torch.linspace(-1, 1, 32).view(2, 16)
        expected = logprobs(whole, ids, document_ids=documents)
        (expected * factor).sum().backward()
        found = logprobs(shared, ids, document_ids=documents)
        (found * factor).sum().backward()
    assert close(found, expected) and not wrong_gradients(kind, whole, shared)


@on_ranks(2)
def test_what_such_a_model_cannot_do_is_refused() -> None:
    """What such a model cannot do, by name."""
    ids = token_ids(1, 6)
    for kind in ("sp", "cp"):
        _, model = pair(kind, "dense")
        cache = KVCache(model.config, 1, 8, tp_size=model.tp_size)
        for name, value in {"cache": cache, "last_logits_only": True, "return_hidden_states": True}.items():
            with pytest.raises(ValueError, match=f"{name} is given to a model whose ranks share tokens; allowed: "):
                model(ids, **{name: value})
    with pytest.raises(ValueError, match="has 6 positions; allowed with 2 context-parallel ranks: a multiple of 4"):
        model(ids)
    _, model = pair("sp", "dense")
    with pytest.raises(
        ValueError, match="there are 5 tokens, which 2 ranks with sequence_parallel cannot share equally"
    ):
        model(token_ids(1, 5))
    group = dist.group.WORLD
    with pytest.raises(ConfigError, match=r"hidden_dropout is 0\.1; allowed with sequence_parallel: 0"):
        GPTModel(tiny(hidden_dropout=0.1), tp_group=group, sequence_parallel=True)
    dropped = tiny(embedding=EmbeddingConfig(embedding_dropout=0.1))
    with pytest.raises(ConfigError, match=r"embedding\.embedding_dropout is 0\.1; allowed with sequence_parallel: 0"):
        GPTModel(dropped, tp_group=group, sequence_parallel=True)
    with pytest.raises(ConfigError, match="vocab_size is 1; allowed: a word or more for each of 2 ranks"):
        GPTModel(tiny(vocab_size=1), tp_group=group)


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("sp", "moe_shared"),
        ("cp", "moe_shared"),
        ("cp", "latent"),
        ("sp", "moe_ahead"),
        ("cp", "tied_latent_ahead"),
        ("p2p", "moe_shared"),
        ("p2p", "latent"),
        ("a2a", "moe_shared"),
        ("a2a", "latent"),
    ],
)
def test_one_graph_a_layer_has_the_same_numbers(kind: str, variant: str) -> None:
    """One graph a layer, without breaks, and the same numbers, of two documents."""
    whole, shared = pair(kind, variant)
    ids, documents = token_ids(2, 16), (torch.arange(16) >= 6).long().repeat(2, 1)
    expected = whole(ids, labels=ids, document_ids=documents, return_logits=False).loss
    expected.backward()
    compile_model(shared, "block", dynamic=False)
    shared.output_layer.loss_chunk_tokens = 10
    loss = shared(ids, labels=ids, document_ids=documents, return_logits=False).loss
    loss.backward()
    assert close(loss, expected) and not wrong_gradients(kind, whole, shared)
