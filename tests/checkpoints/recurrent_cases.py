"""Cases of `family_cases.py`: families with recurrent mixers."""

from typing import Any

_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GRANITE = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_expand": 2}
_NEMOTRON = (
    {"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 6, "n_groups": 2, "head_dim": 16}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"moe_shared_expert_intermediate_size": 40}
)
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16}
        | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3_next-flags": (
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2}
        | {"linear_conv_kernel_dim": 3, "head_dim": 8, "shared_expert_intermediate_size": 20}
        | {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}},
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
        {**_DELTA, **_EXPERTS, "layer_types": ["full_attention", "linear_attention"], "head_dim": 8}
        | {"shared_expert_intermediate_size": 20, "linear_conv_kernel_dim": 2},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.7},
    ),
    "lfm2_moe-flags": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "num_dense_layers": 0, "conv_bias": True, "conv_L_cache": 2}
        | {"use_expert_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False},
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-flags": (
        "lfm2",
        {"num_hidden_layers": 3, "full_attn_idxs": [2], "conv_bias": True, "conv_L_cache": 4}
        | {"block_multiple_of": 5, "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": False},
    ),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2}),
    "mamba2-flags": (
        "mamba2",
        {"num_heads": 8, "head_dim": 4, "expand": 1, "state_size": 5, "n_groups": 1, "conv_kernel": 3}
        | {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False, "tie_word_embeddings": True},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_GRANITE, "shared_intermediate_size": 40, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 4}
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
        | {"logits_scaling": 3.0},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {**_GRANITE, "shared_intermediate_size": 40, "layer_types": ["linear_attention", "full_attention"]}
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 2, "mamba_d_conv": 3}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "bamba": (
        "bamba",
        {**_GRANITE, "num_hidden_layers": 3, "attn_layer_indices": [1], "mlp_bias": True, "attention_bias": True},
    ),
    "bamba-flags": (
        "bamba",
        {**_GRANITE, "attn_layer_indices": [0], "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_proj_bias": True}
        | {"mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 6, "embedding_multiplier": 3.0}
        | {"lm_head_multiplier": 0.3, "attention_in_multiplier": 0.7, "attention_out_multiplier": 0.6}
        | {"key_multiplier": 0.39, "mlp_multipliers": [0.8, 1.7], "ssm_multipliers": [0.35, 0.25, 1.3, 0.5, 1.4]}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.9},
    ),
    "falcon_h1-flags": (
        "falcon_h1",
        {"head_dim": 12, "mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_state": 5, "mamba_n_groups": 2}
        | {"mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_rms_norm": True}
        | {"ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9], "attention_bias": True}
        | {"mlp_bias": True, "tie_word_embeddings": True},
    ),
    "falcon_h1-norm-behind-gate": (
        "falcon_h1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_expand": 3, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, "projectors_bias": True},
    ),
    "mamba": ("mamba", {"state_size": 6}),
    "mamba-flags": (
        "mamba",
        {"state_size": 5, "expand": 3, "intermediate_size": 96, "time_step_rank": 4, "conv_kernel": 3}
        | {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False, "tie_word_embeddings": False},
    ),
    "falcon_mamba": ("falcon_mamba", {"state_size": 6}),
    "falcon_mamba-flags": (
        "falcon_mamba",
        {"state_size": 5, "intermediate_size": 40, "time_step_rank": 4, "conv_kernel": 3, "use_bias": True}
        | {"use_conv_bias": False, "mixer_rms_eps": 1e-3, "tie_word_embeddings": False},
    ),
    "jamba": (
        "jamba",
        {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 6},
    ),
    "jamba-flags": (
        "jamba",
        {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_period": 3}
        | {"expert_layer_offset": 2, "num_experts": 4, "num_experts_per_tok": 1, "mamba_d_state": 5}
        | {"mamba_d_conv": 3, "mamba_expand": 3, "mamba_dt_rank": 7, "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "jamba-dense": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "head_dim": 12, "mamba_d_state": 4},
    ),
    "zamba2": (
        "zamba2",
        {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"]}
        | {"num_key_value_heads": 4, "num_mem_blocks": 2, "adapter_rank": 3, "use_shared_attention_adapter": True}
        | {"n_mamba_heads": 4, "mamba_d_state": 6, "mamba_ngroups": 2, "use_mem_rope": True},
    ),
    "zamba2-flags": (
        "zamba2",
        {"num_hidden_layers": 4, "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"]}
        | {"num_mem_blocks": 1, "adapter_rank": 5, "n_mamba_heads": 2, "mamba_d_state": 5, "mamba_d_conv": 3}
        | {"mamba_expand": 3, "time_step_min": 0.3, "add_bias_linear": True, "hidden_act": "silu"},
    ),
    "minimax": (
        "minimax",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_local_experts": 4, "full_attn_alpha_factor": 1.7, "full_attn_beta_factor": 0.6}
        | {"linear_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.5}
        | {"mlp_beta_factor": 0.7},
    ),
    "minimax-flags": (
        "minimax",
        {
            "head_dim": 12,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "sliding_window": 5,
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
        {**_NEMOTRON, "num_hidden_layers": 4}
        | {"layers_block_type": ["mlp", "linear_attention", "moe", "full_attention"], "n_group": 2}
        | {"topk_group": 1, "norm_topk_prob": False, "mlp_bias": False, "use_bias": True, "use_conv_bias": False}
        | {"conv_kernel": 3, "time_step_min": 0.3},
    ),
    "nemotron_h-latent": (
        "nemotron_h",
        {
            **_NEMOTRON,
            "num_hidden_layers": 4,
            "layers_block_type": ["moe", "full_attention", "moe", "linear_attention"],
            "moe_latent_size": 24,
            "mlp_bias": True,
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **_DELTA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "olmo_hybrid-flags": (
        "olmo_hybrid",
        {"num_hidden_layers": 3, "layer_types": None, "linear_conv_kernel_dim": 3}
        | {"linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_LATENT,
            "linear_head_dim": 7,
            "linear_num_heads": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "kimi_linear-flags": (
        "kimi_linear",
        {**_LATENT, "q_lora_rank": 20, "linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2, "n_group": 2, "topk_group": 1}
        | {"norm_topk_prob": False, "attention_bias": True},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**_LATENT, "head_dim": 7, "n_group": 2, "topk_group": 1}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "bailing_hybrid-flags": (
        "bailing_hybrid",
        {**_LATENT, "head_dim": 6, "layer_group_size": 2, "first_k_dense_replace": 1, "short_conv_kernel_size": 3}
        | {"kda_safe_gate": False, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    ),
}
