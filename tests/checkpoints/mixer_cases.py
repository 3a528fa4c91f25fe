"""Cases of `family_cases.py`: families whose layers have several kinds of mixers, or attention with a gate or sinks."""

from typing import Any

from tests.checkpoints.further_cases import FURTHER
from tests.checkpoints.recurrent_cases import RECURRENT

THREE = ["sliding_attention", "full_attention", "sliding_attention"]
BY_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
}
_SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GRANITE = {
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
_SPARSE = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "index_n_heads": 24,  # so many that hardly a score is zero: of equal scores transformers chooses any
    "index_head_dim": 9,
    "index_topk": 7,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "afmoe",
        {**_SHARED, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5, "global_attn_every_n_layers": 2}
        | {"route_scale": 1.7, "num_shared_experts": 2},
    ),
    "afmoe-scaled-embeddings": (
        "afmoe",
        {**_SHARED, "head_dim": 8, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}
        | {"mup_enabled": True, "attention_bias": True, "num_dense_layers": 0, "num_shared_experts": 1}
        | {"tie_word_embeddings": True},
    ),
    "laguna": (
        "laguna",
        {**_SHARED, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5, "layer_types": THREE}
        | {"num_attention_heads_per_layer": [4, 6, 2], "rope_parameters": BY_TYPE}
        | {"shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.7}
        | {"moe_router_logit_softcapping": 2.0},
    ),
    "laguna-channels": (
        "laguna",
        {
            **_SHARED,
            "head_dim": 8,
            "gating": "per-element",
            "attention_bias": True,
            "shared_expert_intermediate_size": 20,
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "tie_word_embeddings": True,
        },
    ),
    "flint": (
        "flint",
        {**_SHARED, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 5, "shared_expert_intermediate_size": 40},
    ),
    "flint-biases": (
        "flint",
        {**_SHARED, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
        | {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True}
        | {"shared_expert_intermediate_size": 20, "tie_word_embeddings": True},
    ),
    "granite_swa": ("granite_swa", {**_GRANITE, "layer_rope_theta": [0, 1e4, 1e3, 0]}),
    "granite_swa-biases": (
        "granite_swa",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            **_GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "layer_rope_theta": [500.0, 1e4, 0, 1e4],
        },
    ),
    "granitemoe_swa-one-rotation": (
        "granitemoe_swa",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6, "attention_bias": True},
    ),
    "kolibri1": (
        "kolibri1",
        {**_SHARED, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 5}
        | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "kolibri1-without-windows": (
        "kolibri1",
        {
            **_SHARED,
            "head_dim": 8,
            "layer_types": ["full_attention", "full_attention"],
            "shared_expert_intermediate_size": 20,
            "tie_word_embeddings": True,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
        | {"layer_types": THREE, "head_dim": 16, "v_head_dim": 6, "sliding_window": 5, "rope_parameters": BY_TYPE}
        | {"routed_scaling_factor": 1.7, "n_group": 2, "topk_group": 1},
    ),
    "mimo_v2_flash-biases": (
        "mimo_v2_flash",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}
        | {"v_head_dim": 8, "sliding_window": 6, "attention_bias": True, "attention_value_scale": None}
        | {"mlp_layer_types": ["sparse", "dense"], "norm_topk_prob": False, "num_attention_heads": 8},
    ),
    "deepseek_v32": ("deepseek_v32", {**_SPARSE, "first_k_dense_replace": 1, "rope_parameters": _YARN}),
    "deepseek_v32-biases": (
        "deepseek_v32",
        {**_SPARSE, "mlp_layer_types": ["sparse", "dense"], "attention_bias": True},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **_SPARSE,
            "num_hidden_layers": 5,
            "indexer_types": ["full", "shared", "full", "shared", "shared"],
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
        },
    ),
    "glm_moe_dsa-every": (
        "glm_moe_dsa",
        {**_SPARSE, "num_hidden_layers": 3, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ),
    **RECURRENT,
    **FURTHER,
}
