"""Tiny random models of every family beyond the first dense ones, one case per flag that changes the mathematics.

A case is (model_type, options); `make` builds it with transformers. Sizes are small and all different, so that swapped
dimensions do not fit; every parameter is random, so that swapped tensors are noticed."""

from typing import Any

import torch

from tests.checkpoints.compressed_cases import COMPRESSED
from tests.checkpoints.gemma_cases import GEMMAS
from tests.checkpoints.hf_cases import transformers
from tests.checkpoints.mixer_cases import MIXERS

SIZES: dict[str, Any] = (
    {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
    | {"eos_token_id": 2}
)
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
ALTERNATING = ["sliding_attention", "full_attention"]
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
YARN_SCORES = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.5],
    "partial_rotary_factor": 0.75,
}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma-untied-biases": ("gemma", {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-longrope-window": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": 7},
    ),
    "phi": ("phi", {}),
    "phi-qk-norms": ("phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    "olmo": ("olmo", {}),
    "olmo-clipped-biases": ("olmo", {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-tied-biases": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-no-bias": ("glm4", {"head_dim": 8, "attention_bias": False}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 13.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-biases": ("granite", {"attention_multiplier": 0.3, "attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-untied": (
        "smollm3",
        {"no_rope_layers": [0, 1], "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3-windows": ("smollm3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5}),
    "smollm3-rotated-windows": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "no_rope_layers": [1, 0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "nemotron": ("nemotron", {}),
    "nemotron-biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.25}),
    "cohere2-biases": ("cohere2", {"layer_types": ALTERNATING, "sliding_window": 6, "attention_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "seed_oss-other-biases": (
        "seed_oss",
        {"head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "gpt2": ("gpt2", {"n_inner": 48}),
    "gpt2-default-inner": ("gpt2", {"activation_function": "relu"}),
    "gpt2-scaled-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
        },
    ),
    "ministral3-window": (
        "ministral3",
        {"head_dim": 8, "sliding_window": 6, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "internlm3": ("internlm3", {"head_dim": 16}),
    "internlm3-biases": ("internlm3", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "iquestcoder-biases": ("iquestcoder", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "cwm": ("cwm", {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": LLAMA3}),
    "cwm-types": ("cwm", {"head_dim": 8, "sliding_window": 7, "layer_types": ALTERNATING, "mlp_bias": True}),
    "ministral": ("ministral", {"head_dim": 16, "layer_types": ALTERNATING, "sliding_window": 5}),
    "ministral-all": ("ministral", {"head_dim": 8, "sliding_window": 6}),
    "arcee": ("arcee", {"head_dim": 16}),
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "jais2": ("jais2", {"head_dim": 16}),
    "jais2-no-biases": ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5-biases": ("ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": ALPHA}),
    "hunyuan_v1_dense-biases": ("hunyuan_v1_dense", {"head_dim": 8, "attention_bias": True}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere-biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "glm": ("glm", {"head_dim": 16}),
    "glm-no-bias": ("glm", {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 5, "head_dim": 16}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "vaultgemma": (
        "vaultgemma",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "vaultgemma-no-caps": (
        "vaultgemma",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "hyperclovax": (
        "hyperclovax",
        {"head_dim": 16, "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
        | {"logits_scaling": 0.3, "tie_word_embeddings": True},
    ),
    "hyperclovax-no-post-norms": ("hyperclovax", {"use_post_norm": False, "attention_bias": True, "mlp_bias": True}),
    "youtu": ("youtu", {**LATENT, "rope_parameters": YARN_SCORES, "attention_bias": True}),
    "youtu-halves": ("youtu", {**LATENT, "q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": False}),
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**ROUTED, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-not-normalised": ("qwen3_moe", {**ROUTED, "head_dim": 16, "norm_topk_prob": False}),
    "qwen2_moe": ("qwen2_moe", {**ROUTED, "shared_expert_intermediate_size": 40}),
    "qwen2_moe-mixed-window": (
        "qwen2_moe",
        {**ROUTED, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "num_hidden_layers": 3}
        | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-clipped": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.7, "norm_topk_prob": True}),
    "granitemoe": (
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 6.0}
        | {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0}
        | {"tie_word_embeddings": True},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": 4, "attention_multiplier": 0.2, "shared_intermediate_size": 40, "attention_bias": True},
    ),
    "granitemoeshared-none": ("granitemoeshared", {"num_local_experts": 4, "attention_multiplier": 0.2}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
        },
    ),
    "gpt_oss-default-rope": ("gpt_oss", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 1}),
    "glm4_moe": ("glm4_moe", {**SIGMOID, "head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-plain": ("glm4_moe", {**SIGMOID, "head_dim": 16, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "dots1": ("dots1", {**SIGMOID, "head_dim": 8, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "dots1-window": ("dots1", {**SIGMOID, "attention_bias": True, "sliding_window": 5, "max_window_layers": 1}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "ernie4_5_moe-interval": (
        "ernie4_5_moe",
        {"num_hidden_layers": 4, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
        | {"moe_num_shared_experts": 0, "moe_layer_start_index": 1, "moe_layer_end_index": 3}
        | {"moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "ernie4_5_moe-biases": (
        "ernie4_5_moe",
        {"use_bias": True, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "num_experts": 4,
            "moe_topk": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan_v1_moe-plain": ("hunyuan_v1_moe", {"num_experts": 4, "head_dim": 8, "attention_bias": True}),
    "minimax_m2": (
        "minimax_m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2}),
    "exaone_moe": (
        "exaone_moe",
        {**ROUTED, "num_hidden_layers": 4, "sliding_window": 5, "head_dim": 8, "n_group": 4, "topk_group": 2},
    ),
    "exaone_moe-kinds": (
        "exaone_moe",
        {**ROUTED, "layer_types": ALTERNATING, "sliding_window": 6, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "mellum": (
        "mellum",
        {
            **ROUTED,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mellum-full": ("mellum", {**ROUTED, "head_dim": 8, "norm_topk_prob": False, "attention_bias": True}),
    "solar_open": ("solar_open", {**SIGMOID, "head_dim": 16}),
    "solar_open-plain": (
        "solar_open",
        {**SIGMOID, "head_dim": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True}
        | {"tie_word_embeddings": True},
    ),
}
GREEDY = {**SIGMOID, "n_group": None, "topk_group": None}
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {
            **SIGMOID,
            **LATENT,
            "num_experts_per_tok": 3,  # the best two experts are always in the best two groups, valued by their best
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "rope_parameters": YARN_SCORES,
        },
    ),
    "deepseek_v2-greedy-plain-q": (
        "deepseek_v2",
        {**GREEDY, **LATENT, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "deepseek_v2-biases": (
        "deepseek_v2",
        {**GREEDY, **LATENT, "first_k_dense_replace": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v2-biases-plain-q": ("deepseek_v2", {**GREEDY, **LATENT, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {**SIGMOID, **LATENT, "first_k_dense_replace": 1, "rope_parameters": YARN_SCORES, "attention_bias": True},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {**SIGMOID, **LATENT, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0},
    ),
    "axk1": ("axk1", {**SIGMOID, **LATENT, "num_hidden_layers": 3, "rope_parameters": YARN_SCORES}),
    "axk1-kinds": (
        "axk1",
        {**SIGMOID, **LATENT, "mlp_layer_types": ["sparse", "dense"], "rope_interleave": False}
        | {"norm_topk_prob": False, "attention_bias": True},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**SIGMOID, **LATENT, "num_hidden_layers": 3}),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "intermediate_size_mlp": 40, "head_dim": 8, "num_local_experts": 4}
        | {"attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.5, "interleave_moe_layer_step": 2},
    ),
    "llama4-top2": (
        "llama4_text",
        {"intermediate_size_mlp": 40, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"no_rope_layers": [0, 1], "layer_types": ["full_attention", "full_attention"], "use_qk_norm": False}
        | {"attn_temperature_tuning": False, "attention_bias": True},
    ),
    "llama4-other-chunks": (
        "llama4_text",
        {"intermediate_size_mlp": 40, "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 5}
        | {"floor_scale": 4, "no_rope_layers": [1, 0], "layer_types": ["full_attention", "chunked_attention"]},
    ),
    "llama4-dense": (  # as MobileLLM-R1
        "llama4_text",
        {"intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"moe_layers": [], "interleave_moe_layer_step": 0, "no_rope_layers": [1, 1], "attention_chunk_size": 7}
        | {"tie_word_embeddings": True},
    ),
    "hy_v3": ("hy_v3", {**ROUTED, "head_dim": 16, "num_shared_experts": 2, "attention_bias": True}),
    "hy_v3-biases": ("hy_v3", {**ROUTED, "head_dim": 8, "mlp_bias": True}),
}
CASES = {**DENSE, **MIXTURES, **LATENTS, **MIXERS, **GEMMAS, **COMPRESSED}
WITHOUT_EXPERTS = (
    *("llama4-dense", "gemma4-wide", "gemma4-full", "granitemoehybrid-dense", "jamba-dense", "glm_moe_dsa-every"),
)
"""Models without experts, of families that may have them."""


def family_of(case: str) -> str:
    """Return the family of a case, here or in tests/te_models/hf_models.py."""
    from tests.te_models import hf_models

    return {**hf_models.CASES, **CASES}[case][0]


def make(case: str, *, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return the case's model in eval mode. SDPA in transformers leaves soft-capping and sinks out: eager attention."""
    family, options = CASES[case]
    config = transformers.AutoConfig.for_model(family, **{**(GPT2_SIZES if family == "gpt2" else SIZES), **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        fill(model)
    return model.to(dtype)


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Random weights, large enough that every part matters to the logits; norms and biases near what they start as."""
    stored = model.state_dict().keys()
    tables = ("slope_rate", "_decay")  # which follow from the configuration
    buffers = [buffer for name, buffer in model.named_buffers() if name in stored and not name.endswith(tables)]
    for tensor in buffers:
        if not tensor.is_floating_point():  # a table of experts by token
            experts = range(model.config.n_routed_experts)
            rows = [torch.randperm(len(experts))[: tensor.shape[1]] for _ in tensor]
            tensor.copy_(torch.stack(rows))
    for tensor in (*model.parameters(), *(buffer for buffer in buffers if buffer.is_floating_point())):
        if tensor.dim() <= 1 or tensor.shape[0] == 1:
            tensor.add_(torch.randn_like(tensor) * 0.2)
        else:
            tensor.normal_(std=0.15)
