"""Another number of tokens: old rows keep their bits, new ones are their mean or random, tied or not."""

from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import export_hf
from te_models.config import EmbeddingConfig
from tests.build import tiny, token_ids
from tests.checkpoints.hf_cases import stored


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_rows_and_round_trip(tied: bool, tmp_path: Path) -> None:
    model = GPTModel(tiny(embedding=EmbeddingConfig(share_embeddings_and_output_weights=tied)), dtype=torch.bfloat16)
    words, ids = model.config.vocab_size, token_ids(1, 8)
    before, table = model(ids).logits, model.embedding.word_embeddings.weight.clone()
    assert model.resize_token_embeddings() is model.embedding.word_embeddings
    assert model.resize_token_embeddings(words + 1, pad_to_multiple_of=64).weight.shape[0] % 64 == 0
    weight, more = model.embedding.word_embeddings.weight, model.config.vocab_size
    assert more > words and torch.equal(weight[:words], table)
    assert torch.equal(weight[words:], table.float().mean(0).bfloat16().expand(more - words, -1))
    found = model(ids).logits
    assert found.shape[-1] == more
    torch.testing.assert_close(found[..., :words], before)
    model.save_pretrained(tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "hf")
    assert torch.equal(stored(tmp_path / "hf")["model.embed_tokens.weight"], weight)
    assert torch.equal(GPTModel.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)(ids).logits, found)
    model.resize_token_embeddings(words)
    torch.testing.assert_close(model(ids).logits, before)
    random = model.resize_token_embeddings(more, mean_resizing=False).weight[words:].float()
    assert random.std() == pytest.approx(model.config.init_method_std, rel=0.2) and random.unique().numel() > 50
    assert (model.output_layer.weight is None) == tied
    with pytest.raises(ValueError, match="new_num_tokens is 0 and pad_to_multiple_of None; allowed: 1 or more"):
        model.resize_token_embeddings(0)


def test_it_trains_afterwards() -> None:
    model, ids = GPTModel(tiny()), token_ids(1, 8)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model(ids, labels=ids, return_logits=False).loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
