"""olmo_hybrid, kimi_linear and bailing_hybrid as they are published, which is not as transformers writes them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf
from tests.checkpoints.families.test_families import loaded, save
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.mixer_cases import MIXERS

PUBLISHED = {
    "olmo_hybrid": {
        "layers.0.linear_attn.q_conv1d.weight": [16, 1, 4],
        "layers.0.linear_attn.v_conv1d.weight": [24, 1, 4],
        "layers.0.attention_layer_norm.weight": [32],
        "layers.0.feedforward_layer_norm.weight": [32],
        "layers.1.post_attention_layernorm.weight": [32],
        "layers.1.post_feedforward_layernorm.weight": [32],
    },
    "kimi_linear": {
        "layers.0.self_attn.A_log": [1, 1, 3, 1],
        "layers.0.self_attn.f_b_proj.weight": [21, 7],
        "layers.0.mlp.gate_proj.weight": [48, 32],
        "layers.1.block_sparse_moe.gate.weight": [4, 32],
        "layers.1.block_sparse_moe.experts.3.w2.weight": [32, 24],
    },
    "bailing_hybrid": {
        "word_embeddings.weight": [61, 32],
        "layers.0.attention.f_proj.weight": [28, 32],
        "layers.1.attention.dense.weight": [32, 24],
        "layers.1.attention.g_proj.weight": [4, 32],
        "layers.1.mlp.gate.expert_bias": [4],
    },
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_published_names_are_written_and_read_by_both(tmp_path: Path, family: str) -> None:
    theirs = make(family)
    source = save(theirs, tmp_path / "hf")
    in_memory = save(theirs, tmp_path / "memory", save_original_format=False)
    import_hf(source, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "hub", form="published")
    found = stored(tmp_path / "hub")
    shapes = {name: list(found[f"model.{name}"].shape) for name in PUBLISHED[family]}
    assert shapes == PUBLISHED[family]
    loaded(tmp_path / "hub", theirs)
    for folder in (tmp_path / "hub", in_memory):
        import_hf(folder, tmp_path / f"{folder.name}-ours")
        assert_same_bits(stored(tmp_path / "ours"), stored(tmp_path / f"{folder.name}-ours"))
        export_hf(tmp_path / f"{folder.name}-ours", tmp_path / f"{folder.name}-back")
        assert_same_bits(stored(folder), stored(tmp_path / f"{folder.name}-back"))


def values_of(case: str) -> dict[str, Any]:
    return json.loads(make(case).config.to_json_string())


def test_the_published_spelling_of_kimi() -> None:
    values, family = values_of("kimi_linear"), FAMILIES["kimi_linear"]
    config = family.read_config(values)
    inner = {"head_dim": 7, "num_heads": 3, "short_conv_kernel_size": 4}
    inner |= {"full_attn_layers": [2], "kda_layers": [1, 3]}
    assert family.write_config(config)["linear_attn_config"] == inner
    for name in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types"):
        values.pop(name)
    hub = values | {"linear_attn_config": inner, "first_k_dense_replace": 1, "moe_layer_freq": 1, "rope_theta": 1e4}
    hub |= {"mla_use_nope": True, "use_grouped_topk": True, "moe_router_activation_func": "sigmoid"}
    assert family.read_config(hub) == config
    names = {"num_experts_per_tok": 2, "max_position_embeddings": 64, "n_group": 1, "n_shared_experts": 1}
    assert family.read_config(hub | names) == config
    without = {**hub, "num_hidden_layers": 6, "linear_attn_config": {"head_dim": 7, "num_heads": 3}}
    assert family.read_config(without).layer_mixers == ("gated_delta",) * 4 + ("attention", "gated_delta")


def test_the_published_spelling_of_ling() -> None:
    values, family = values_of("bailing_hybrid"), FAMILIES["bailing_hybrid"]
    config = family.read_config(values)
    assert values["head_dim"] == 4 and values["linear_head_dim"] == 7  # transformers overwrites the first
    for name in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "rope_parameters"):
        values.pop(name)
    assert family.read_config(values | {"head_dim": 7, "rope_theta": 6e6}) == config


def test_layers_of_olmo_hybrid_by_default() -> None:
    family, values = FAMILIES["olmo_hybrid"], values_of("olmo_hybrid-flags")
    sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    absent = {name: value for name, value in values.items() if name not in (*sizes, "layer_types")}
    config = family.read_config(absent)
    assert config == family.read_config(values | dict.fromkeys((*sizes, "layer_types")))
    assert config.layer_blocks == ("pre", "pre", "post") and config.block == "post"
    assert config == family.read_config(values)
    assert family.read_config(absent | {"num_hidden_layers": 9}).layer_mixers.count("attention") == 2
    only = family.read_config(values | {"layer_types": ["full_attention"] * 3})
    assert only.layer_mixers is None and only.layer_blocks is None


REFUSED = [
    *((family, {"hidden_act": "gelu"}) for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba")),
    *((family, {"hidden_act": "gelu"}) for family in ("granitemoehybrid", *PUBLISHED)),
    ("kimi_linear", {"tie_word_embeddings": True}),
    ("kimi_linear", {"mla_use_nope": False}),
    ("kimi_linear", {"use_grouped_topk": False}),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}),
    ("kimi_linear", {"num_experts_per_tok": 3}),
    ("kimi_linear", {"linear_attn_config": [1]}),
    ("bailing_hybrid", {"tie_word_embeddings": True}),
    ("bailing_hybrid", {"q_lora_rank": 3}),
    ("bailing_hybrid", {"layer_types": None, "layer_group_size": 0}),
    ("bailing_hybrid", {"kda_lower_bound": 1.0}),
    ("olmo_hybrid", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}),
]


@pytest.mark.parametrize(("family", "changes"), REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(family: str, changes: dict[str, Any]) -> None:
    case = next(case for case, (name, _) in MIXERS.items() if name == family)
    name = next(reversed(changes))
    with pytest.raises(CheckpointError, match=re.escape("decay_lower_bound" if name == "kda_lower_bound" else name)):
        FAMILIES[family].read_config(values_of(case) | changes)


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [1, 4], ["a", 3]])
def test_layers_that_are_numbered_wrongly_are_refused(numbers: list) -> None:
    values = values_of("kimi_linear") | {"layer_types": None}
    values["linear_attn_config"] = {"full_attn_layers": [2], "kda_layers": numbers}
    with pytest.raises(CheckpointError, match="allowed: each number from 1 to 3 once"):
        FAMILIES["kimi_linear"].read_config(values)
