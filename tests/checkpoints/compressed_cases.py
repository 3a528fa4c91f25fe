"""Cases of `family_cases.py`: DeepSeek-V4, whose layers attend to compressed keys."""

from typing import Any

_SIZES: dict[str, Any] = {
    "num_key_value_heads": 1,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 24,  # so many that hardly a score is zero: of equal scores transformers chooses any
    "index_head_dim": 12,
    "index_topk": 3,
    "sliding_window": 5,
    "hc_mult": 2,
    "partial_rotary_factor": 0.5,
}

COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": (
        "deepseek_v4",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 6},
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
            "swiglu_limit": 1.5,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "deepseek_v4-published-rates": (
        "deepseek_v4",
        {
            **_SIZES,
            "o_groups": 4,
            "num_hidden_layers": 2,
            "layer_types": ["compressed_sparse_attention", "sliding_attention"],
            "mlp_layer_types": ["hash_moe", "moe"],
            "scoring_func": "sigmoid",
            "index_topk": 2,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 5,
            "tie_word_embeddings": True,
        },
    ),
}
