"""The row of the padding token, which gets no gradient from the input: as in transformers, in every family."""

import json
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, export_hf, import_hf
from te_models.config import EmbeddingConfig
from te_models.kernels.embedding import embedding
from te_models.layers.distributed.vocab_parallel import VocabShard, vocab_parallel_embedding
from tests.build import tiny, token_ids
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import transformers

FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}
WITHOUT = {
    *("gpt2", "gpt_neox", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "bloom", "mpt", "falcon"),
    *("mamba", "mamba2", "falcon_mamba", "nemotron_h"),
}
"""Families whose classes tell the embedding nothing of padding."""


def embedding_of(model: transformers.PreTrainedModel) -> torch.nn.Embedding:
    found = model.get_input_embeddings()
    assert isinstance(found, torch.nn.Embedding)
    return found


@pytest.mark.sentinels("gemma", "deepseek_v3", "gpt2", "cohere2", "nemotron_h")
@pytest.mark.parametrize("family", FIRST_CASES)
def test_gradients_are_transformers(family: str) -> None:
    """Also of tied weights, of which the output layer's part stays."""
    theirs = make(FIRST_CASES[family])
    token = embedding_of(theirs).padding_idx
    assert (token is None) == (family in WITHOUT)
    ours = GPTModel.from_hf(theirs).eval()  # without dropout
    assert ours.config.embedding.padding_idx == token
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, ::3] = 0
    theirs(ids, labels=ids).loss.backward()
    output = ours(ids, ids)
    loss = output.loss if output.aux_loss is None else output.loss - output.aux_loss
    loss.backward()
    expected, got = embedding_of(theirs).weight.grad, ours.embedding.word_embeddings.weight.grad
    assert got is not None
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    tied = ours.config.embedding.share_embeddings_and_output_weights
    assert bool((got[0] == 0).all()) == (token == 0 and not tied)


@pytest.mark.sentinels("phi3", "qwen3_moe", "gpt2")
@pytest.mark.parametrize("family", FIRST_CASES)
def test_pad_token_id_comes_and_goes(tmp_path: Path, family: str) -> None:
    source = tmp_path / "hf"
    make(FIRST_CASES[family]).save_pretrained(source)
    values = json.loads((source / "config.json").read_text())
    known = family not in WITHOUT
    classes_default = getattr(type(transformers.AutoConfig.for_model(family))(), "pad_token_id", None)
    if family == "xglm":  # where others change positions, too, and are refused
        return
    for given, expected in ((7, 7), (0, 0), (None, None), (-1, 60), (61, None), ("absent", classes_default)):
        written = {k: v for k, v in values.items() if k != "pad_token_id"}
        written |= {} if given == "absent" else {"pad_token_id": given}
        (source / "config.json").write_text(json.dumps(written))
        expected = expected if known and expected is not None and expected < 61 else None
        import_hf(source, tmp_path / "ours", overwrite=True)
        export_hf(tmp_path / "ours", tmp_path / "back", overwrite=True)
        assert json.loads((tmp_path / "back/config.json").read_text()) == written
        config = json.loads((tmp_path / "ours/config.json").read_text())["config"]
        assert config["embedding"].get("padding_idx") == expected
        if expected is not None:  # a folder of before there was the field: nothing of config.json is lost
            assert FAMILIES[family].write_config(FAMILIES[family].read_config(written))["pad_token_id"] == expected


def test_the_row_is_left_alone_and_others_are_as_ever() -> None:
    ids = torch.tensor([[2, 5, 5, 0, 2]])
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(7, 4, dtype=dtype, requires_grad=True)
        plain = torch.nn.functional.embedding(ids, weight.float(), padding_idx=5)
        (expected,) = torch.autograd.grad((plain * plain.detach()).sum(), weight)
        rows = embedding(ids, weight, None, 5)
        assert torch.equal(rows, weight[ids])
        (got,) = torch.autograd.grad((rows * rows.detach()).sum(), weight)
        torch.testing.assert_close(got, expected)
        assert (got[5] == 0).all()
        summed = torch.zeros(7, 4)
        embedding(ids, weight, summed, 5).sum().backward()
        assert (summed[5] == 0).all() and (summed[2] == 2).all()
        parts = [
            vocab_parallel_embedding(ids, half, VocabShard(rank, 2, "", 7), None, 5)
            for rank, half in enumerate((weight[:4], weight[4:]))
        ]
        (got,) = torch.autograd.grad((sum(parts) * rows.detach()).sum(), weight)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_models_without_a_folder_have_none_and_start_with_the_same_weights(compiled: bool) -> None:
    assert "padding_idx" not in tiny().to_dict()["embedding"]
    torch.manual_seed(0)
    plain = GPTModel(tiny(num_layers=1))
    torch.manual_seed(0)
    padded = GPTModel(tiny(num_layers=1, embedding=EmbeddingConfig(padding_idx=5)))
    for a, b in zip(plain.parameters(), padded.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = token_ids(2, 9)
    ids[:, 4] = 5
    (torch.compile(padded, backend="aot_eager", fullgraph=True) if compiled else padded)(ids, ids).loss.backward()
    grad = padded.embedding.word_embeddings.weight.grad
    assert (grad[5] == 0).all() and grad.abs().sum() > 0
    padded.resize_token_embeddings(5)
    assert padded.config.embedding.padding_idx is None and padded.config.vocab_size == 5
    padded(ids.clamp(max=4), ids.clamp(max=4)).loss.backward()
