"""Folders and live models: quantized weights stay quantized, small files travel along."""

from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import dequantize, quantize
from te_models.layers import GroupedTensor, QuantizedTensor, autocast, recipe
from tests.build import tiny, tiny_moe, token_ids


def fields(model: GPTModel) -> dict[str, torch.Tensor]:
    """Every stored tensor of a model, quantized ones field by field, as bytes."""
    entries = {}
    for name, tensor in model.stored_tensors():
        parts = tensor.fields if isinstance(tensor, QuantizedTensor) else {"": tensor.detach()}
        entries.update({name + part: value.contiguous().flatten().view(torch.uint8) for part, value in parts.items()})
    return entries


def assert_same(a: GPTModel, b: GPTModel) -> None:
    left, right = fields(a), fields(b)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_a_quantized_folder_loads_and_saves_as_it_is(name: str, tmp_path: Path) -> None:
    plain = GPTModel(tiny_moe())
    plain.save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", name)
    model = GPTModel.from_pretrained(tmp_path / "quantized")
    assert isinstance(model.get_parameter("decoder.layers.0.mlp.experts.linear_fc1.weight"), GroupedTensor)
    assert_same(model, GPTModel.from_pretrained(tmp_path / "plain", recipe=recipe(name)))
    model.save_pretrained(tmp_path / "again")
    assert_same(GPTModel.from_pretrained(tmp_path / "again"), model)
    ids = token_ids(2, 9)
    with autocast(recipe=recipe(name)), torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    dequantize(tmp_path / "quantized", tmp_path / "values")
    values = GPTModel.from_pretrained(tmp_path / "values")
    stored = dict(model.named_parameters())
    for fqn, parameter in values.named_parameters():
        expected = stored[fqn].dequantize() if isinstance(stored[fqn], QuantizedTensor) else stored[fqn]
        assert torch.equal(parameter, expected), fqn
    assert_same(GPTModel.from_pretrained(tmp_path / "quantized", dequantize=True), values)
    with pytest.raises(ValueError, match="choose one of them"):
        GPTModel.from_pretrained(tmp_path / "quantized", dequantize=True, recipe=recipe(name))


def test_small_files_travel_along(tmp_path: Path) -> None:
    GPTModel(tiny_moe()).save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    GPTModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert (tmp_path / "second" / "tokenizer.json").read_text() == "{}"


@torch.no_grad()
def test_parameters_that_a_user_has_shared_are_saved_under_each_name(tmp_path: Path) -> None:
    model = GPTModel(tiny())
    model.output_layer.weight = model.embedding.word_embeddings.weight
    model.decoder.layers[1] = model.decoder.layers[0]
    model.save_pretrained(tmp_path / "saved")
    loaded = GPTModel.from_pretrained(tmp_path / "saved")
    ids = torch.arange(7)[None]
    assert len(list(loaded.parameters())) > len(list(model.parameters()))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
