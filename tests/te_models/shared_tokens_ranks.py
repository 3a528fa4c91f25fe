"""What each of the two processes of test_shared_tokens does: this module is run with RESULTS and the cases.

A case is "KIND VARIANT": of a model of tests.te_models.configs, under sequence ("sp") or context parallelism ("cp"),
the loss, the router loss, logits and all gradients are those of the whole model on one rank.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

from te_models import ConfigError, GPTModel, KVCache, RouterRecord, compile_model, logprobs
from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.config import EmbeddingConfig
from tests.ranks import report_cases
from tests.te_models.configs import FURTHER, VARIANTS, tiny, token_ids
from tests.te_models.split_model_ranks import close

LENGTH = {"sp": 7, "cp": 16}


def pair(kind: str, variant: str) -> tuple[GPTModel, GPTModel]:
    """The whole model, and the one whose ranks share tokens, of the same values."""
    config, options = (VARIANTS | FURTHER)[variant], {}
    if variant == "dynamic_rope":  # longer sequences than in the first training, on which the frequencies depend
        config = config.replace(max_position_embeddings=8)
    if kind in ("sp", "tp"):
        options = {"tp_group": dist.group.WORLD, "sequence_parallel": kind == "sp"}
    models = []
    for its in ({}, options):
        torch.manual_seed(0)
        models.append(GPTModel(config, **its))
    if kind == "cp":
        models[1].set_context_parallel_group(dist.group.WORLD)
    return models[0], models[1]


def wrong_gradients(kind: str, whole: GPTModel, shared: GPTModel) -> list[str]:
    """Return the names of parameters whose gradients are not the whole model's."""
    owned = parts(whole.config, expected_tensors(whole.config), ShardPlace(tp_rank=dist.get_rank(), tp_size=2))
    expected, wrong = {name: p.grad for name, p in whole.named_parameters()}, []
    for name, parameter in shared.named_parameters():
        right, part = expected[name], owned[name]
        if right is None:  # of an indexer that no loss trains
            assert parameter.grad is None and "index" in name
            continue
        if kind == "cp":
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        elif part.dim is not None:
            right = torch.cat([right.narrow(part.dim, begin, end - begin) for begin, end in part.ranges], part.dim)
        if not close(parameter.grad, right):
            wrong.append(name)
    return wrong


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
        assert wrong_gradients(kind, whole, shared) == []


def log_probs(kind: str, variant: str) -> None:
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
    assert close(found, expected) and wrong_gradients(kind, whole, shared) == []


def is_refused() -> None:
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


def compiles(kind: str, variant: str) -> None:
    """One graph a layer, without breaks, and the same numbers, of two documents."""
    whole, shared = pair(kind, variant)
    ids, documents = token_ids(2, 16), (torch.arange(16) >= 6).long().repeat(2, 1)
    expected = whole(ids, labels=ids, document_ids=documents, return_logits=False).loss
    expected.backward()
    compile_model(shared, "block", dynamic=False)
    shared.output_layer.loss_chunk_tokens = 10
    loss = shared(ids, labels=ids, document_ids=documents, return_logits=False).loss
    loss.backward()
    assert close(loss, expected) and wrong_gradients(kind, whole, shared) == []


if __name__ == "__main__":
    asked = sys.argv[2:]
    cases = {name: partial(is_the_whole_model, *name.split()) for name in asked if len(name.split()) == 2}
    cases |= {name: partial(compiles, *name.split()[1:]) for name in asked if name.startswith("compiled")}
    cases |= {name: partial(log_probs, *name.split()[1:]) for name in asked if name.startswith("logprobs")}
    report_cases(
        cases | {name: is_refused for name in asked if name == "refused"},
        sys.argv[1],
    )
