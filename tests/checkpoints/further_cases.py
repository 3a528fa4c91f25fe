"""Cases of `family_cases.py`: families of elements that others have, too."""

from typing import Any

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 16,
}

FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "helium": ("helium", {"head_dim": 8}),
    "helium-biases": ("helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {}),
    "stablelm-flags": (
        "stablelm",
        {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        },
    ),
    "persimmon": ("persimmon", {}),
    "persimmon-without-norms": ("persimmon", {"qk_layernorm": False, "tie_word_embeddings": True}),
    "minicpm3": ("minicpm3", {**_LATENT, "scale_emb": 3.0, "scale_depth": 0.9, "dim_model_base": 12}),
    "minicpm3-flags": (
        "minicpm3",
        {**_LATENT, "q_lora_rank": None, "v_head_dim": None, "scale_depth": None, "dim_model_base": None}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "rope_parameters": _LONGROPE},
    ),
    "mistral4": (
        "mistral4",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.3}
            | {"llama_4_scaling_beta": 0.4},
        },
    ),
    "mistral4-groups": (
        "mistral4",
        {**_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4}
        | {"topk_group": 2, "norm_topk_prob": False, "q_lora_rank": None, "rope_interleave": False}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gptj-flags": (
        "gptj",
        {"rotary_dim": 8, "n_inner": 48, "activation_function": "relu", "tie_word_embeddings": True},
    ),
    "codegen": ("codegen", {"rotary_dim": 4}),
    "codegen-flags": (
        "codegen",
        {"num_attention_heads": 8, "rotary_dim": 2, "n_inner": 48, "tie_word_embeddings": True},
    ),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_bigcode-flags": (
        "gpt_bigcode",
        {"multi_query": False, "scale_attn_weights": False, "activation_function": "relu"}
        | {"attention_softmax_in_fp32": False, "scale_attention_softmax_in_fp32": False}
        | {"tie_word_embeddings": False},
    ),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 5}),
    "gpt_neo-flags": (
        "gpt_neo",
        {"num_hidden_layers": 3, "attention_types": [[["local"], 2], [["global"], 1]], "window_size": 7}
        | {"intermediate_size": None, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "nanochat": ("nanochat", {}),
    "nanochat-flags": (
        "nanochat",
        {"final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "opt": ("opt", {"ffn_dim": 48, "dropout": 0.0}),
    "opt-flags": (
        "opt",
        {
            "ffn_dim": 40,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "xglm": ("xglm", {"ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}),
    "xglm-flags": (
        "xglm",
        {"ffn_dim": 40, "scale_embedding": False, "activation_function": "relu", "tie_word_embeddings": False},
    ),
    "biogpt": ("biogpt", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "biogpt-flags": ("biogpt", {"scale_embedding": False, "hidden_act": "relu", "tie_word_embeddings": False}),
    "bloom": ("bloom", {}),
    "bloom-6-heads": ("bloom", {"hidden_size": 48, "num_attention_heads": 6, "tie_word_embeddings": False}),
    "mpt": ("mpt", {"max_seq_len": 64}),
    "mpt-flags": (
        "mpt",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3},
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("falcon", {}),
    "falcon-two-norms": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48, "tie_word_embeddings": False},
    ),
    "falcon-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-in-turn": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "activation": "relu"}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
        },
    ),
    "dbrx-flags": (
        "dbrx",
        {
            "d_model": 32,
            "attn_config": {"clip_qkv": 9.0, "kv_n_heads": 4, "rope_theta": 5e5},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 6,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
                "ffn_act_fn": {"name": "gelu"},
            },
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "apertus": ("apertus", {}),
    "apertus-flags": (
        "apertus",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 7}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts": 6, "num_shared_experts": 2}
        | {"prefix_dense_intermediate_size": 40, "logit_scale": 0.5},
    ),
    "cohere2_moe-flags": (
        "cohere2_moe",
        {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 7}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"mlp_layer_types": ["dense", "dense", "sparse"], "prefix_dense_sliding_window_pattern": 4}
        | {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1}
        | {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-4}
        | {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "lfm3": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        },
    ),
    "lfm3-flags": (
        "lfm3",
        {"num_hidden_layers": 3, "head_dim": 8, "layer_types": ["conv", "full_attention", "conv"]}
        | {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True, "conv_bias": True}
        | {"conv_L_cache": 4, "tie_word_embeddings": False},
    ),
}
