"""Gemma 3n and 4: spellings of their configurations, tensors that layers without keys leave behind, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf
from te_models.config import ConfigError, ModelConfig
from te_models.layouts import Facts, check_layout_rules
from te_models.model.mlp import sparse_gates
from tests.checkpoints.families.test_families import save, tokens
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import assert_same_bits, stored


def values_of(case: str) -> dict[str, Any]:
    return json.loads(make(case).config.to_json_string())


def config_of(case: str) -> ModelConfig:
    values = values_of(case)
    return FAMILIES[values["model_type"]].read_config(values)


@pytest.mark.parametrize("case", ["gemma3n", "gemma4-wide"])
@torch.no_grad()
def test_keys_of_layers_that_read_others_come_back(tmp_path: Path, case: str) -> None:
    """Published files hold them; other layers have to have them."""
    theirs = make(case)
    source = save(theirs, tmp_path / "hf")
    tensors = stored(source)
    shared = theirs.config.num_hidden_layers - 1
    left = {f"model.layers.{shared}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    tensors |= {name: torch.randn(3) for name in left}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert set(import_hf(source, tmp_path / "ours").passthrough) == {f"carried.{name}" for name in left}
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(tensors, stored(tmp_path / "back"))
    expected = theirs(tokens(9)).logits
    got = GPTModel.from_pretrained(tmp_path / "ours").eval()(tokens(9)).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    wrong = {n.replace(f"layers.{shared}", "layers.0") + "x": t for n, t in tensors.items() if n in left}
    wrong = {name: tensor.clone() for name, tensor in wrong.items()}
    save_file(tensors | wrong, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not part of this model: 'model.layers.0"):
        import_hf(source, tmp_path / "no")


@torch.no_grad()
def test_gemma3n_beside_models_that_see_and_hear(tmp_path: Path) -> None:
    theirs = make("gemma3n")
    source = save(theirs, tmp_path / "hf")
    text = json.loads((source / "config.json").read_text())
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in stored(source).items()}
    others = ("vision_tower.timm_model.stem.weight", "audio_tower.conformer.0.weight", "embed_vision.embedding.weight")
    tensors |= {f"model.{name}": torch.randn(3, 2).half() for name in others}
    config = {"model_type": "gemma3n", "text_config": text, "vision_config": {"depth": 1}, "dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert len(import_hf(source, tmp_path / "ours").passthrough) == len(others)
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(tensors, stored(tmp_path / "back"))
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    expected = theirs(tokens(9)).logits
    got = GPTModel.from_pretrained(tmp_path / "ours").eval()(tokens(9)).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_both_spellings_of_gemma4_s_full_layers() -> None:
    """transformers writes per_layer_config; published files have three fields, which an export writes."""
    values, family = values_of("gemma4"), FAMILIES["gemma4_text"]
    spelled = {name: value for name, value in values.items() if name != "per_layer_config"}
    spelled |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert family.read_config(spelled) == family.read_config(values)
    written = family.write_config(family.read_config(values))
    assert "per_layer_config" not in written and written["global_head_dim"] == 16
    assert written["num_global_key_value_heads"] == 1 and written["attention_k_eq_v"] is True
    assert family.read_config(spelled | {"use_bidirectional_attention": "vision"}) == family.read_config(values)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config = .*; supported: the same head_dim"),
        ("gemma4", {"use_double_wide_mlp": True}, "use_double_wide_mlp with enable_moe_block; supported: one of them"),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6; allowed: 0 to 5"),
        ("gemma4", {"num_kv_shared_layers": 5}, "no layer before these is of the kind of layer 2, full"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("gemma3n", {"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern = 0.5; supported: a number for"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5]}, "1 activation_sparsity_pattern and 6 layers"),
        ("gemma3n", {"activation_sparsity_pattern": [1.5] * 6}, "activation_sparsity is .*; allowed: numbers from 0"),
        ("gemma3n", {"intermediate_size": [1, 2]}, "2 intermediate_size and 6 layers"),
        ("gemma3n", {"altup_active_idx": 3}, "alternating_updates.active is 3; allowed: 0 to 2"),
        ("gemma3n", {"laurel_rank": 0}, "laurel_rank is 0; allowed: positive"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(case: str, changes: dict[str, Any], message: str) -> None:
    values = values_of(case)
    with pytest.raises(CheckpointError, match=message):
        FAMILIES[values["model_type"]].read_config(values | changes)


def test_one_width_and_no_pattern_of_gemma3n() -> None:
    """One width is that of all layers; of more than 10 layers the first 10 have sparse gates."""
    values = values_of("gemma3n-flags") | {"intermediate_size": 48, "num_hidden_layers": 12}
    values |= {"layer_types": None, "activation_sparsity_pattern": None}
    config = FAMILIES["gemma3n_text"].read_config(values)
    assert config.ffn_hidden_sizes is None and config.mlp.ffn_hidden_size == 48
    assert config.activation_sparsity == (0.95,) * 10 + (0.0,) * 2
    assert config.layer_types == (("sliding",) * 4 + ("full",)) * 2 + ("sliding",) * 2


def test_gates_are_zero_in_the_fraction_that_is_asked_for() -> None:
    hidden = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) * 3 + 1
    gate, up = sparse_gates(hidden, 1.6448536).chunk(2, -1)
    assert torch.equal(up, hidden[:, 10_000:])
    assert (gate == 0).float().mean().item() == pytest.approx(0.95, abs=0.005)


@torch.no_grad()
def test_layers_that_read_the_tokens_ask_for_them() -> None:
    model = GPTModel(config_of("gemma4")).eval()
    embedded = model.embedding.word_embeddings(tokens(5))
    with pytest.raises(ValueError, match=r"per_layer_embedding, moe.hash_layers\); allowed: input_ids"):
        model(inputs_embeds=embedded)
    with pytest.raises(ConfigError, match=r"per_layer_embedding: .*cannot be cut into stages"):
        model.stage(0, 3)


def test_what_ranks_cannot_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_sparsity: .* cannot be split over 2 ranks"):
        check_layout_rules(Facts(model=config_of("gemma3n"), tp=2, etp=2))
    with pytest.raises(ConfigError, match="alternating_updates: a model with it cannot have sequence_parallel"):
        check_layout_rules(Facts(model=config_of("gemma3n"), tp=2, sequence_parallel=True))
