"""What published files say otherwise than transformers' save, and what transformers cannot compute or misreads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf
from tests.checkpoints.family_cases import SIZES, make
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back

TOKENS = torch.randint(3, 61, (2, 23), generator=torch.Generator().manual_seed(0))


def rewrite(folder: Path, without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if name not in without}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def read(model_type: str, **values: Any) -> Any:
    return FAMILIES[model_type].read_config({"model_type": model_type, **SIZES, **values})


@torch.no_grad()
def test_biases_of_internlm3_have_the_names_of_the_release(tmp_path: Path) -> None:
    theirs = make("internlm3-biases")
    theirs.save_pretrained(tmp_path / "hf")
    config = rewrite(tmp_path / "hf", ("attention_bias", "mlp_bias"), qkv_bias=True, bias=True)
    there_and_back(tmp_path / "hf", tmp_path)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    got, expected = GPTModel.from_pretrained(tmp_path / "ours").eval()(TOKENS).logits, theirs(TOKENS).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    written = FAMILIES["internlm3"].write_config(read("internlm3", qkv_bias=True, bias=True))
    assert written["qkv_bias"] is True and written["bias"] is True and "attention_bias" not in written
    for values in ({"qkv_bias": True, "bias": False}, {"qkv_bias": True}, {"attention_bias": True, "bias": False}):
        with pytest.raises(CheckpointError, match="supported: the same value of qkv_bias and bias"):
            read("internlm3", **values)


def test_without_a_window_every_layer_is_full() -> None:
    """transformers 5.23 divides by zero (exaone4), or finds no window for the mask that it makes (ministral)."""
    for pattern in (None, 4, "LLLG"):
        config = read("exaone4", num_hidden_layers=4, sliding_window=None, sliding_window_pattern=pattern)
        assert config.layer_types == ("full",) * 4 and config.rotates(3)
    assert read("ministral", sliding_window=None).layer_types == ("full", "full")


def test_letters_of_exaone4() -> None:
    kinds = read("exaone4", num_hidden_layers=6, sliding_window=8, sliding_window_pattern="LLG").layer_types
    assert kinds == ("sliding", "sliding", "nope") * 2
    last = read("exaone4", num_hidden_layers=4, sliding_window=8, sliding_window_pattern="LLG").layer_types
    assert last == ("sliding", "sliding", "nope", "nope")
    with pytest.raises(CheckpointError, match="'LXG'; allowed: a positive integer, or letters L and G"):
        read("exaone4", sliding_window_pattern="LXG")
    with pytest.raises(CheckpointError, match=r"'LLG'; allowed: a positive integer$"):
        read("cohere2", sliding_window_pattern="LLG")


@torch.no_grad()
def test_axk1_as_it_is_published(tmp_path: Path) -> None:
    """Without a bias for the choice, and with norms of dense layers, which nothing uses."""
    theirs = make("axk1")
    for module in theirs.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.zero_()
    theirs.save_pretrained(tmp_path / "hf")
    tensors = {name: t for name, t in stored(tmp_path / "hf").items() if "e_score_correction_bias" not in name}
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    unused = "model.layers.0.post_mlp_layernorm.weight"
    tensors[unused] = torch.randn(32, generator=torch.Generator().manual_seed(1))
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    rewrite(tmp_path / "hf", topk_method="greedy")
    assert import_hf(tmp_path / "hf", tmp_path / "ours").passthrough == (f"carried.{unused}",)
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "hf"), stored(tmp_path / "back"))
    got, expected = GPTModel.from_pretrained(tmp_path / "ours").eval()(TOKENS).logits, theirs(TOKENS).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rotation_of_cwm_where_its_file_does_not_say() -> None:
    rope = read("cwm", num_hidden_layers=5).rope
    assert (rope.scaling, rope.rotary_base, rope.factor) == ("llama3", 1e6, 16.0)
    assert read("cwm", num_hidden_layers=5).layer_types == ("full", "sliding", "sliding", "sliding", "full")
