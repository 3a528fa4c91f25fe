"""What llama.cpp calls families, their configuration and their tensors, in both directions.

A file's keys begin with the name of its architecture. They say what changes the results, and not what only training
asks for. Both directions are one table, so that what is written is checked by reading it back (`writing.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.checkpoints.io.errors import CheckpointError

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "granite": "granite",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "cohere": "command-r",
    "arcee": "arcee",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
}
"""Family -> llama.cpp's architecture."""

FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Key, after the architecture -> field of config.json; `rope.*` and the number of experts are apart."""
_OWN_FIELDS = {
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
    "stablelm": {"attention.layer_norm_epsilon": "layer_norm_eps"},
    "command-r": {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
}
"""Architecture -> key and field of config.json that it alone has."""
_EXPERTS = {"llama": "num_local_experts"} | dict.fromkeys(("qwen2moe", "qwen3moe", "olmoe"), "num_experts")
_FAMILIES = {arch: family for family, arch in reversed(ARCHITECTURES.items())}
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "mlp_bias": False},
    "mixtral": {"hidden_act": "silu", "sliding_window": None},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen2_moe": {"hidden_act": "silu", "norm_topk_prob": False, "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3_moe": {"hidden_act": "silu", "norm_topk_prob": True, "use_sliding_window": False},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh"},
    "olmo2": {"hidden_act": "silu", "attention_bias": False},
    "olmoe": {"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": False, "clip_qkv": None},
    "granite": {"hidden_act": "silu", "mlp_bias": False},
    "smollm3": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    "stablelm": {"hidden_act": "silu", "qk_layernorm": False},
    "cohere": {"hidden_act": "silu", "attention_bias": False, "use_qk_norm": False},
    "arcee": {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    "ernie4_5": {"hidden_act": "silu", "use_bias": False},
    "seed_oss": {"hidden_act": "silu", "mlp_bias": False},
}
"""What llama.cpp computes of a family whatever a file says."""
_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models whose queries llama.cpp scales by hidden size / heads instead of the heads' size."""
NORM_PLUS_ONE = ("gemma", "gemma2", "gemma3")
"""Architectures whose files hold the weights of norms plus one."""
_PERMUTED = ("llama", "granite", "smollm3", "arcee")
"""Architectures whose rows of queries and keys llama.cpp orders by neighbouring channels."""
_PARTLY_ROTATED = ("stablelm",)
_BIASES = {
    "llama": {"attention_bias": "attn_q"},
    "mixtral": {"attention_bias": "attn_q"},
    "granite": {"attention_bias": "attn_q"},
    "stablelm": {"use_qkv_bias": "attn_q"},
    "seed_oss": {"attention_bias": "attn_q", "attention_out_bias": "attn_output"},
}
"""Family -> field of config.json that a bias in the first layer decides."""


def gguf_hf_config(fields: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return config.json of a file with these key-value pairs and tensors; CheckpointError for what is not known."""
    arch = fields.get("general.architecture")
    if arch not in _FAMILIES:
        raise CheckpointError(f"{where} holds a {arch!r} model; supported: {', '.join(_FAMILIES)}")
    family = _FAMILIES[arch]
    if arch == "llama" and fields.get("llama.expert_count"):
        family = "mixtral"
    config: dict[str, Any] = {"model_type": family, "dtype": "float32"}
    for key, field in (FIELDS | _OWN_FIELDS.get(arch, {})).items():
        if f"{arch}.{key}" in fields:
            config[field] = _plain(fields[f"{arch}.{key}"])
    if f"{arch}.expert_count" in fields and arch in _EXPERTS:
        config[_EXPERTS[arch]] = fields[f"{arch}.expert_count"]
    missing = [f for f in ("hidden_size", "num_hidden_layers", "num_attention_heads") if f not in config]
    if missing:
        raise CheckpointError(f"{where} does not say its {missing[0]}")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "vocab_size" not in config:
        embedding = tensors.get("token_embd.weight")
        config["vocab_size"] = int(embedding.shape[-1]) if embedding is not None else 0
    if family in ("llama", "mixtral"):
        config.pop("sliding_window", None)
    config |= {field: f"blk.0.{bias}.bias" in tensors for field, bias in _BIASES.get(family, {}).items()}
    config |= _FIXED[family]
    if family == "stablelm":
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    if family == "smollm3":
        config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["rope_parameters"] = _rope(fields, arch, where)
    rotated = fields.get(f"{arch}.rope.dimension_count", config["head_dim"])
    if arch in _PARTLY_ROTATED:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / config["head_dim"]
    elif rotated != config["head_dim"]:
        key, allowed = f"{arch}.rope.dimension_count", f"{config['head_dim']}, the channels of a head"
        raise CheckpointError(f"{where} has {key} = {rotated}; supported: {allowed}")
    if family in _GEMMA_27B:
        wide = config["num_hidden_layers"] == _GEMMA_27B[family]
        scale = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
        config["query_pre_attn_scalar"] = scale
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": float(fields.get(f"{arch}.rope.freq_base_swa", 10000.0))}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        kinds = ("sliding_attention",) * 5 + ("full_attention",)
        config["layer_types"] = [kinds[i % 6] for i in range(config["num_hidden_layers"])]
    for name, key in {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}.items():
        if f"tokenizer.ggml.{name}_token_id" in fields:
            config[key] = fields[f"tokenizer.ggml.{name}_token_id"]
    return config


def _plain(value: Any) -> Any:
    """Return a number without the digits that float32 adds: 9.999999747378752e-06 is the nearest one to 1e-05."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _rope(fields: Mapping[str, Any], arch: str, where: str) -> dict[str, Any]:
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = _plain(float(fields.get(f"{arch}.rope.freq_base", 10000.0)))
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _plain(float(fields[f"{arch}.rope.scaling.factor"]))}
        original = fields.get(f"{arch}.rope.scaling.original_context_length")
        if kind == "yarn" and original is not None:
            rope["original_max_position_embeddings"] = original
    elif kind != "none":
        raise CheckpointError(f"{where} has {arch}.rope.scaling.type = {kind!r}; supported: none, linear, yarn")
    return rope


def key_values(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the key-value pairs of a config.json as transformers writes it, without the tokenizer's."""
    arch = ARCHITECTURES[family]
    found: dict[str, Any] = {}
    for key, field in (FIELDS | _OWN_FIELDS.get(arch, {})).items():
        if config.get(field) is not None and not (field == "sliding_window" and arch not in NORM_PLUS_ONE):
            found[f"{arch}.{key}"] = config[field]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
    experts = config.get("num_local_experts") or config.get("num_experts")  # transformers has both names
    if arch in _EXPERTS and experts:
        found[f"{arch}.expert_count"] = experts
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        local = rope["sliding_attention"]
        if local.get("rope_type", "default") == "default":
            found[f"{arch}.rope.freq_base_swa"] = float(local["rope_theta"])
        rope = rope["full_attention"]
    found[f"{arch}.rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    found[f"{arch}.rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        found |= {f"{arch}.rope.scaling.type": kind, f"{arch}.rope.scaling.factor": float(rope["factor"])}
        original = rope.get("original_max_position_embeddings")
        if original is not None:
            found[f"{arch}.rope.scaling.original_context_length"] = original
    elif kind != "default":
        raise CheckpointError(
            f"a rotary embedding of the type {kind!r} is not written to GGUF; allowed: default, linear, yarn"
        )
    return found


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor of a family's files is in a GGUF file.

    name: of the tensor; expert: its number in a stack, None: it is the whole; heads: of rows that llama.cpp orders by
    neighbouring channels, 0: as they are; plus_one: whether the file has the weight plus one.
    """

    name: str
    expert: int | None = None
    heads: int = 0
    plus_one: bool = False


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def places(names: Any, arch: str, config: Mapping[str, Any], package: Any) -> dict[str, TensorPlace]:
    """Return the place of each tensor of a family's files; CheckpointError for one that llama.cpp has no name for."""
    enum = next(number for number, name in package.MODEL_ARCH_NAMES.items() if name == arch)
    table = package.get_tensor_name_map(enum, config["num_hidden_layers"])
    found: dict[str, TensorPlace] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        whole = name if match is None else f"{match[1]}.{match[3]}"
        known = table.get_name(whole, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise CheckpointError(f"llama.cpp's architecture {arch!r} has no tensor for {name!r}")
        heads = 0
        if arch in _PERMUTED and re.search(r"\.(q|k)_proj\.", name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        plus_one = arch in NORM_PLUS_ONE and name.endswith("norm.weight")
        found[name] = TensorPlace(known, None if match is None else int(match[2]), heads, plus_one)
    shared: dict[tuple[str, int | None], str] = {}
    for name, place in found.items():
        other = shared.setdefault((place.name, place.expert), name)
        if other != name:
            raise CheckpointError(f"{other!r} and {name!r} would both be {place.name!r}")
    return found
