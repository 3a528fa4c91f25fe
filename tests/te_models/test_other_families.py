"""Parts that the six converted families do not use, against transformers' models that do; weights mapped by hand.

gemma2: sandwich norms, 1 + weight, both softcaps, embedding multiplier, query scale, alternating windows. olmo2: norms
after, full q and k norms. cohere: parallel block with one LayerNorm without bias, interleaved rotation, logit scale.
gpt_oss: sinks, clamped SwiGLU, all biases, softmax after top-k, yarn without truncation. granite: four multipliers.
glm4_moe: sigmoid router with bias, groups and scale, shared experts, partial rotation, a dense first layer. qwen2_moe:
gated shared expert. gpt2: learned positions, LayerNorm with bias, plain GELU MLP. gpt_neox: parallel block with two
norms, exact GELU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from te_models import (
    AttentionConfig,
    EmbeddingConfig,
    GPTModel,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OURS = {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "max_position_embeddings": 64}
TIED = EmbeddingConfig(share_embeddings_and_output_weights=True)
Weights = dict[str, Tensor]


def attention(**changes: object) -> AttentionConfig:
    return AttentionConfig(**{"num_attention_heads": 4, "num_query_groups": 2, **changes})


CONFIGS: dict[str, tuple[dict, ModelConfig]] = {
    "gemma2": (
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # SDPA in transformers leaves the softcap out
        },
        ModelConfig(
            **OURS,
            attention=attention(kv_channels=16, softmax_scale=24**-0.5, softcap=2.0, window_size=5),
            mlp=MLPConfig(ffn_hidden_size=48, activation="gelu_tanh"),
            norm=NormConfig(layernorm_epsilon=1e-6, layernorm_zero_centered_gamma=True, cast_order="weight_first"),
            block="sandwich",
            layer_types=("sliding", "full"),
            embedding=TIED.replace(multiplier="sqrt_hidden_in_weight_dtype", logits_softcap=3.0),
        ),
    ),
    "olmo2": (
        {"tie_word_embeddings": True},
        ModelConfig(
            **OURS,
            attention=attention(qk_layernorm="full"),
            mlp=MLPConfig(ffn_hidden_size=48),
            norm=NormConfig(layernorm_epsilon=1e-5, cast_order="weight_first"),
            block="post",
            embedding=TIED,
        ),
    ),
    "cohere": (
        {"logit_scale": 0.25},
        ModelConfig(
            **OURS,
            attention=attention(),
            mlp=MLPConfig(ffn_hidden_size=48),
            norm=NormConfig(normalization="LayerNorm", layernorm_epsilon=1e-5, cast_order="weight_first"),
            rope=RopeConfig(style="interleaved", rotary_base=500000.0),
            block="parallel_shared_norm",
            embedding=TIED.replace(logits_multiplier=0.25),
        ),
    ),
    "gpt_oss": (
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        ModelConfig(
            **OURS,
            attention=attention(sinks=True, add_qkv_bias=True, add_output_bias=True, window_size=5),
            mlp=MLPConfig(ffn_hidden_size=48, clamp=7.0, alpha=1.702, up_offset=1.0),
            norm=NormConfig(layernorm_epsilon=1e-5, cast_order="weight_first"),
            rope=RopeConfig(
                rotary_base=150000.0,
                scaling="yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
            layer_types=("sliding", "full"),
            moe=MoEConfig(
                num_moe_experts=4,
                moe_router_topk=2,
                moe_ffn_hidden_size=48,
                bias=True,
                router=RouterConfig(score_after_topk=True, linear_bias=True, normalize=False),
            ),
        ),
    ),
    "granite": (
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
        ModelConfig(
            **OURS,
            attention=attention(softmax_scale=0.2),
            mlp=MLPConfig(ffn_hidden_size=48),
            norm=NormConfig(layernorm_epsilon=1e-6),
            residual_multiplier=0.4,
            embedding=TIED.replace(multiplier=6.0, logits_multiplier=0.25),
        ),
    ),
    "glm4_moe": (
        {
            "head_dim": 8,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        ModelConfig(
            **OURS,
            attention=attention(add_qkv_bias=True, qk_layernorm="head"),
            mlp=MLPConfig(ffn_hidden_size=48),
            norm=NormConfig(layernorm_epsilon=1e-5),
            rope=RopeConfig(rotary_percent=0.5),
            moe=MoEConfig(
                num_moe_experts=8,
                moe_router_topk=2,
                moe_ffn_hidden_size=24,
                layers=(1,),
                shared_expert_intermediate_size=24,
                router=RouterConfig(
                    score="sigmoid",
                    expert_bias=True,
                    normalize_eps=1e-20,
                    scaling_factor=2.5,
                    num_groups=4,
                    topk_groups=2,
                    dtype="float32",
                ),
            ),
        ),
    ),
    "qwen2_moe": (
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
        ModelConfig(
            **OURS,
            attention=attention(add_qkv_bias=True),
            mlp=MLPConfig(ffn_hidden_size=48),
            norm=NormConfig(layernorm_epsilon=1e-6),
            moe=MoEConfig(
                num_moe_experts=6,
                moe_router_topk=2,
                moe_ffn_hidden_size=24,
                shared_expert_intermediate_size=40,
                shared_expert_gate=True,
                router=RouterConfig(normalize=False),
            ),
        ),
    ),
    "gpt2": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
        ModelConfig(
            **OURS,
            attention=AttentionConfig(num_attention_heads=4, add_qkv_bias=True, add_output_bias=True),
            mlp=MLPConfig(ffn_hidden_size=48, activation="gelu_tanh", gated=False, bias=True),
            norm=NormConfig(normalization="LayerNorm", layernorm_epsilon=1e-5, bias=True),
            embedding=TIED.replace(position_embedding_type="learned_absolute"),
        ),
    ),
    "gpt_neox": (
        {"attention_bias": True},
        ModelConfig(
            **OURS,
            attention=AttentionConfig(num_attention_heads=4, add_qkv_bias=True, add_output_bias=True),
            mlp=MLPConfig(ffn_hidden_size=48, activation="gelu", gated=False, bias=True),
            norm=NormConfig(normalization="LayerNorm", layernorm_epsilon=1e-5, bias=True),
            rope=RopeConfig(rotary_percent=0.25),
            block="parallel",
        ),
    ),
}


def map_attention(w: Weights, p: str, q: str, out: Weights) -> None:
    for kind in ("weight", "bias"):
        if f"{p}self_attn.q_proj.{kind}" in w:
            parts = [w[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            out[f"{q}self_attention.linear_qkv.{kind}"] = torch.cat(parts)
        if f"{p}self_attn.o_proj.{kind}" in w:
            out[f"{q}self_attention.linear_proj.{kind}"] = w[f"{p}self_attn.o_proj.{kind}"]
    for x in "qk":
        if f"{p}self_attn.{x}_norm.weight" in w:
            out[f"{q}self_attention.{x}_layernorm.weight"] = w[f"{p}self_attn.{x}_norm.weight"]
    if f"{p}self_attn.sinks" in w:
        out[f"{q}self_attention.core_attention.softmax_offset"] = w[f"{p}self_attn.sinks"]


def map_mlp(w: Weights, p: str, q: str, out: Weights) -> None:
    """p names their MLP, q ours."""
    out[f"{q}linear_fc1.weight"] = torch.cat([w[f"{p}gate_proj.weight"], w[f"{p}up_proj.weight"]])
    out[f"{q}linear_fc2.weight"] = w[f"{p}down_proj.weight"]


def map_experts(family: str, w: Weights, p: str, q: str, out: Weights) -> None:
    gate = "router" if family == "gpt_oss" else "gate"
    out[f"{q}router.weight"] = w[f"{p}{gate}.weight"]
    fc1, fc2 = w[f"{p}experts.gate_up_proj"], w[f"{p}experts.down_proj"]
    if family == "gpt_oss":  # [E, in, out], gate and up columns alternating
        fc1 = torch.cat((fc1[..., ::2], fc1[..., 1::2]), dim=-1).transpose(1, 2)
        fc2 = fc2.transpose(1, 2)
        bias = w[f"{p}experts.gate_up_proj_bias"]
        out[f"{q}experts.linear_fc1.bias"] = torch.cat((bias[:, ::2], bias[:, 1::2]), dim=-1)
        out[f"{q}experts.linear_fc2.bias"] = w[f"{p}experts.down_proj_bias"]
        out[f"{q}router.bias"] = w[f"{p}router.bias"]
    out[f"{q}experts.linear_fc1.weight"], out[f"{q}experts.linear_fc2.weight"] = fc1, fc2
    if f"{p}gate.e_score_correction_bias" in w:
        out[f"{q}router.expert_bias"] = w[f"{p}gate.e_score_correction_bias"]
    for name in ("shared_experts", "shared_expert"):
        if f"{p}{name}.gate_proj.weight" in w:
            map_mlp(w, f"{p}{name}.", f"{q}shared_experts.", out)
    if f"{p}shared_expert_gate.weight" in w:
        out[f"{q}shared_experts.gate_weight"] = w[f"{p}shared_expert_gate.weight"]


# Our norm's name, by block kind: theirs.
NORMS: dict[str, dict[str, str]] = {
    "pre": {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", "N2": "post_attention_layernorm."},
    "post": {
        "post_self_attn_layernorm.": "post_attention_layernorm.",
        "post_mlp_layernorm.": "post_feedforward_layernorm.",
    },
    "sandwich": {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "post_self_attn_layernorm.": "post_attention_layernorm.",
        "N2": "pre_feedforward_layernorm.",
        "post_mlp_layernorm.": "post_feedforward_layernorm.",
    },
    "parallel_shared_norm": {"input_layernorm.": "input_layernorm."},
}


def map_llama_like(family: str, config: ModelConfig, w: Weights) -> Weights:
    out = {
        "embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": w["model.norm.weight"],
    }
    if not config.embedding.share_embeddings_and_output_weights:
        out["output_layer.weight"] = w["lm_head.weight"]
    for i in range(config.num_layers):
        p, q = f"model.layers.{i}.", f"decoder.layers.{i}."
        map_attention(w, p, q, out)
        moe = config.is_moe_layer(i)
        second = "pre_mlp_layernorm." if moe else "mlp.linear_fc1.layer_norm_"
        for ours, theirs in NORMS[config.block].items():
            out[q + (second if ours == "N2" else ours) + "weight"] = w[f"{p}{theirs}weight"]
        if moe:
            map_experts(family, w, f"{p}mlp.", f"{q}mlp.", out)
        else:
            map_mlp(w, f"{p}mlp.", f"{q}mlp.", out)
    return out


def map_gpt2(family: str, config: ModelConfig, w: Weights) -> Weights:
    """Their linear layers store [in, out]."""
    out = {
        "embedding.word_embeddings.weight": w["transformer.wte.weight"],
        "embedding.position_embeddings.weight": w["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"decoder.final_layernorm.{kind}"] = w[f"transformer.ln_f.{kind}"]
        for i in range(config.num_layers):
            p, q = f"transformer.h.{i}.", f"decoder.layers.{i}."
            out[f"{q}self_attention.linear_qkv.layer_norm_{kind}"] = w[f"{p}ln_1.{kind}"]
            out[f"{q}mlp.linear_fc1.layer_norm_{kind}"] = w[f"{p}ln_2.{kind}"]
            for ours, theirs in {
                "self_attention.linear_qkv": "attn.c_attn",
                "self_attention.linear_proj": "attn.c_proj",
                "mlp.linear_fc1": "mlp.c_fc",
                "mlp.linear_fc2": "mlp.c_proj",
            }.items():
                out[f"{q}{ours}.{kind}"] = w[f"{p}{theirs}.{kind}"].t()
    return out


def map_gpt_neox(family: str, config: ModelConfig, w: Weights) -> Weights:
    """Their q, k, v rows alternate head by head."""
    out = {
        "embedding.word_embeddings.weight": w["gpt_neox.embed_in.weight"],
        "output_layer.weight": w["lm_head.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"decoder.final_layernorm.{kind}"] = w[f"gpt_neox.final_layer_norm.{kind}"]
        for i in range(config.num_layers):
            p, q = f"gpt_neox.layers.{i}.", f"decoder.layers.{i}."
            out[f"{q}self_attention.linear_qkv.layer_norm_{kind}"] = w[f"{p}input_layernorm.{kind}"]
            out[f"{q}mlp.linear_fc1.layer_norm_{kind}"] = w[f"{p}post_attention_layernorm.{kind}"]
            heads = w[f"{p}attention.query_key_value.{kind}"].unflatten(0, (4, 3, -1))
            out[f"{q}self_attention.linear_qkv.{kind}"] = heads.transpose(0, 1).flatten(0, 2)
            for ours, theirs in {
                "self_attention.linear_proj": "attention.dense",
                "mlp.linear_fc1": "mlp.dense_h_to_4h",
                "mlp.linear_fc2": "mlp.dense_4h_to_h",
            }.items():
                out[f"{q}{ours}.{kind}"] = w[f"{p}{theirs}.{kind}"]
    return out


MAPS: dict[str, Callable[[str, ModelConfig, Weights], Weights]] = {"gpt2": map_gpt2, "gpt_neox": map_gpt_neox}


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(family: str) -> None:
    options, config = CONFIGS[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs_config = transformers.AutoConfig.for_model(family, **{**SIZES, **options})
        theirs = transformers.AutoModelForCausalLM.from_config(
            theirs_config, attn_implementation=options.get("attn_implementation")
        ).eval()
        biases = [b for name, b in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
        for tensor in (*theirs.parameters(), *biases):
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            else:
                tensor.normal_(std=0.15)
    ours = GPTModel(config).eval()
    ours.load_state_dict(MAPS.get(family, map_llama_like)(family, config, theirs.state_dict()))
    ids = torch.randint(3, 97, (2, 23), generator=torch.Generator().manual_seed(0))
    expected, got = theirs(ids).logits, ours(ids).logits
    assert expected.std() > 0.05
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
