"""A config.json that is written anew, because the model changed, in the fields that the original had."""

from typing import Any

import pytest

from te_models.checkpoints.families import FAMILIES
from te_models.checkpoints.folder.hf_config import export_config
from te_models.checkpoints.folder.te_folder import HFSource

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SPELLINGS: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 500000.0, "rope_scaling": None},
    "theta alone": {"rope_theta": 500000.0},
    "type": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_type": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
    "both": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


def exported(original: dict[str, Any], family: str = "llama", **changes: Any) -> dict[str, Any]:
    known = FAMILIES[family]
    config = known.read_config(original)
    source = HFSource(family, original, "BF16")
    written = export_config(config.replace(**changes), source, known, "BF16")
    assert known.read_config(written) == config.replace(**changes)
    return written


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_export_of_fewer_layers_keeps_the_original_s_fields(spelling: str) -> None:
    original = BASE | SPELLINGS[spelling]
    written = exported(original, num_layers=2)
    for name, value in (original | {"num_hidden_layers": 2}).items():
        assert written[name] == value, name
    assert ("rope_parameters" in written) == ("rope_parameters" in original)
    assert exported(original) == original


def test_a_changed_base_is_where_the_base_was() -> None:
    original = BASE | SPELLINGS["type"]
    rope = FAMILIES["llama"].read_config(original).rope
    written = exported(original, rope=rope.replace(rotary_base=20000.0))
    assert written["rope_theta"] == 20000.0 and written["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert "rope_parameters" not in written


def test_two_embeddings_of_older_files() -> None:
    original = BASE | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    written = exported(original, "gemma3_text", vocab_size=48)
    for name in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        assert written[name] == original[name]
    assert "rope_parameters" not in written


def test_names_that_would_contradict_each_other_are_not_added() -> None:
    """transformers has two names for the number of experts."""
    original = BASE | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 4}
    original |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "rope_theta": 10000.0}
    moe = FAMILIES["qwen3_moe"].read_config(original).moe
    assert moe.num_moe_experts == 4
    written = exported(original, "qwen3_moe", moe=moe.replace(num_moe_experts=3))
    assert {written.get("num_experts", 3), written.get("num_local_experts", 3)} == {3}
    assert written["rope_theta"] == 10000.0 and "rope_parameters" not in written
