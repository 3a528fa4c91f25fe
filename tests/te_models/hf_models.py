"""Tiny random transformers models, one case per flag that changes the mathematics of a family."""

from typing import Any

import torch
import transformers

SIZES = (
    {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
    | {"eos_token_id": 2}
)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-head_dim": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama-multi_query": ("llama", {"num_key_value_heads": 1}),
    **{f"llama-rope-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-window": (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "qwen3_moe-mixed": ("qwen3_moe", {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True}),
}


def hf_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> transformers.PreTrainedModel:
    """Return the case's model in eval mode, with weights large enough that every part matters to the logits."""
    family, options = CASES[name]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.mul_(5)
    return model.to(dtype)


def token_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens without the special ones, [batch, length]."""
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
