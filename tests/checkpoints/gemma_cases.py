"""Cases of `family_cases.py`: Gemma 3n and 4, whose layers add more to the residual stream than mixers and MLPs."""

from typing import Any

_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2

GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "layer_types": _TYPES,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 50,
            "hidden_size_per_layer_input": 6,
            "sliding_window": 5,
            "final_logit_softcapping": 3.0,
            "laurel_rank": 10,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.7, 0.0],
            "intermediate_size": [48, 40, 48, 40, 56, 48],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3n-flags": (
        "gemma3n_text",
        {
            "layer_types": ["full_attention"] * 2,
            "head_dim": 8,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 10,
            "laurel_rank": 6,
            "altup_num_inputs": 2,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "altup_coef_clip": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {"num_hidden_layers": 6, "layer_types": _TYPES, "head_dim": 8, "global_head_dim": 16}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2}
        | {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 6, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20, "sliding_window": 5}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma4-biases": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": _TYPES[:3],
            "head_dim": 16,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 1,
            "moe_intermediate_size": 20,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0},
            },
        },
    ),
    "gemma4-wide": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 8,
            "global_head_dim": 12,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "sliding_window": 6,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 10,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma4-full": (
        "gemma4_text",
        {
            "layer_types": ["full_attention"] * 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 6,
        },
    ),
}
