"""Cases of `family_cases.py`: families with recurrent mixers."""

from __future__ import annotations

from typing import Any

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GRANITE = {
    "mamba_n_heads": 4,
    "mamba_d_state": 6,
    "mamba_expand": 2,
}
_NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 6,
    "n_groups": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_next-flags": (
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": None,
            "full_attention_interval": 2,
            "linear_conv_kernel_dim": 3,
            "head_dim": 8,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        {
            **_DELTA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16,
            "attention_bias": True,
        },
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {
            **_DELTA,
            **_EXPERTS,
            "layer_types": ["full_attention", "linear_attention"],
            "head_dim": 8,
            "shared_expert_intermediate_size": 20,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm2_moe-flags": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 0,
            "conv_bias": True,
            "conv_L_cache": 2,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-flags": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "full_attn_idxs": [2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 5,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2}),
    "mamba2-flags": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 4,
            "expand": 1,
            "state_size": 5,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "residual_in_fp32": False,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "shared_intermediate_size": 40,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "bamba",
        {**_GRANITE, "num_hidden_layers": 3, "attn_layer_indices": [1], "mlp_bias": True, "attention_bias": True},
    ),
    "bamba-flags": (
        "bamba",
        {
            **_GRANITE,
            "attn_layer_indices": [0],
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_NEMOTRON,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron_h-flags": (
        "nemotron_h",
        {
            **_NEMOTRON,
            "num_hidden_layers": 4,
            "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention"],
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "mlp_bias": False,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_min": 0.3,
        },
    ),
}
