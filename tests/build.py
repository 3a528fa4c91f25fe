"""What tests build: tiny models, a hypothesis strategy over their configurations, and a quantizer of each format."""

import re
from typing import Any

import torch
from hypothesis import strategies as st

from te_models import (
    AttentionConfig,
    EmbeddingConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
    TemperatureConfig,
)
from te_models.config import (
    AlternatingUpdatesConfig,
    CompressedConfig,
    HyperConnectionConfig,
    IndexerConfig,
    PerLayerEmbeddingConfig,
)
from te_models.layers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer
from te_models.layers.quantizer import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer

VOCAB = 61


def heads(groups: int | None = 2, **fields: Any) -> AttentionConfig:
    """Attention of four heads, in two groups of keys or as many."""
    return AttentionConfig(num_attention_heads=4, num_query_groups=groups, **fields)


def tiny(**changes: Any) -> ModelConfig:
    """A dense model of two layers, with the named fields changed."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "max_position_embeddings": 64,
        "attention": heads(),
        "mlp": MLPConfig(ffn_hidden_size=48),
        # Large enough that every part moves the logits.
        "init_method_std": 0.2,
    }
    return ModelConfig(**{**fields, **changes})


def tiny_moe(router: RouterConfig | None = None, **changes: Any) -> ModelConfig:
    """A model of two layers of four experts, with the named fields of the mixture changed."""
    fields: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    return tiny(moe=MoEConfig(**{**fields, **changes}, router=router or RouterConfig()))


def one_layer(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The same with one layer."""
    moe = None if config.moe is None else config.moe.replace(layers=None)
    return config.replace(num_layers=1, layer_types=None, moe=moe, **config.mixers_of([0]) | changes)


LATENT: dict[str, int] = {"kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}

ONE_KEY: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "kv_channels": 16,
    "key_is_value": True,
    "sinks": True,
    "window_size": 3,
}
COMPRESSED: dict[str, int] = {"q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 6}

VARIANTS: dict[str, ModelConfig] = {
    "dense": tiny(),
    "post": tiny(block="post"),
    "sandwich": tiny(block="sandwich"),
    "blocks_by_layer": tiny(num_layers=3, block="post", layer_blocks=("pre", "post", "sandwich")),
    "parallel": tiny(block="parallel"),
    "parallel_shared_norm": tiny(block="parallel_shared_norm"),
    "layernorm": tiny(norm=NormConfig(normalization="LayerNorm", bias=True)),
    "norm_without_weight": tiny(norm=NormConfig(normalization="LayerNorm", has_weight=False)),
    "zero_centered": tiny(norm=NormConfig(layernorm_zero_centered_gamma=True, cast_order="weight_first")),
    "biases": tiny(
        attention=heads(None, add_qkv_bias=True, add_output_bias=True),
        mlp=MLPConfig(ffn_hidden_size=48, bias=True),
        embedding=EmbeddingConfig(output_bias=True),
    ),
    "qk_head": tiny(attention=heads(qk_layernorm="head")),
    "qk_biases_scale_by_layer": tiny(
        attention=heads(qk_layernorm="head", qk_layernorm_bias=True, softmax_scale_by_layer=True),
        norm=NormConfig(normalization="LayerNorm", bias=True),
    ),
    "qk_full": tiny(attention=heads(qk_layernorm="full")),
    "qk_after_rope": tiny(attention=heads(None, qk_layernorm="head", qk_layernorm_after_rope=True)),
    "window": tiny(attention=heads(None, window_size=3)),
    "mixed_layers": tiny(
        num_layers=3,
        attention=heads(None, window_size=3),
        layer_types=("sliding", "full", "nope"),
        rope_sliding=RopeConfig(rotary_base=100.0),
    ),
    "softcaps": tiny(
        attention=heads(softcap=2.0, softmax_scale=0.5),
        embedding=EmbeddingConfig(logits_softcap=3.0, logits_multiplier=0.5, multiplier="sqrt_hidden_in_weight_dtype"),
    ),
    "sinks_clip": tiny(attention=heads(sinks=True, clip_qkv=1.0)),
    "value_width": tiny(attention=heads(v_head_dim=12)),
    "multipliers": tiny(residual_multiplier=0.3, embedding=EmbeddingConfig(multiplier=2.0)),
    "tied": tiny(embedding=EmbeddingConfig(share_embeddings_and_output_weights=True)),
    "learned_positions": tiny(embedding=EmbeddingConfig(position_embedding_type="learned_absolute")),
    "no_positions": tiny(embedding=EmbeddingConfig(position_embedding_type="none")),
    "interleaved_partial": tiny(rope=RopeConfig(style="interleaved", rotary_percent=0.5)),
    "dynamic_rope": tiny(rope=RopeConfig(scaling="dynamic", factor=2.0)),
    "ungated": tiny(mlp=MLPConfig(ffn_hidden_size=48, gated=False, activation="squared_relu")),
    "clamped": tiny(mlp=MLPConfig(ffn_hidden_size=48, clamp=1.0, alpha=1.7, up_offset=1.0)),
    "moe": tiny_moe(aux_loss_coeff=0.01, z_loss_coeff=0.001),
    "moe_sigmoid_groups": tiny_moe(
        RouterConfig(
            score="sigmoid", expert_bias=True, num_groups=2, topk_groups=1, scaling_factor=2.5, dtype="float32"
        )
    ),
    "moe_shared": tiny_moe(shared_expert_intermediate_size=40, shared_expert_gate=True, layers=(1,)),
    "moe_biases": tiny_moe(RouterConfig(linear_bias=True, score_after_topk=True), bias=True),
    "moe_shared_biases": tiny_moe(shared_expert_intermediate_size=40, layers=(1,)).replace(
        mlp=MLPConfig(ffn_hidden_size=48, bias=True)
    ),
    "moe_latent": tiny_moe(
        RouterConfig(score="sigmoid"), moe_latent_size=24, shared_expert_intermediate_size=40
    ).replace(mlp=MLPConfig(ffn_hidden_size=48, gated=False, bias=True, activation="squared_relu")),
    "moe_sandwich": tiny_moe().replace(block="sandwich"),
    "latent": tiny(attention=heads(None, mla=MLAConfig(q_lora_rank=12, **LATENT))),
    "latent_plain_q_interleaved": tiny(
        attention=heads(None, mla=MLAConfig(**LATENT), add_output_bias=True), rope=RopeConfig(style="interleaved")
    ),
    "latent_biases_plain_q": tiny(attention=heads(None, mla=MLAConfig(**LATENT), add_qkv_bias=True)),
    "sparse": tiny(attention=heads(indexer=IndexerConfig(n_heads=6, head_dim=10, topk=4))),
    "sparse_latent": tiny(
        attention=heads(
            None,
            mla=MLAConfig(q_lora_rank=12, **LATENT),
            indexer=IndexerConfig(n_heads=6, head_dim=10, topk=4, rotated="last", rope_style="interleaved"),
        )
    ),
    "chunked_l2_temperature": tiny(
        attention=heads(
            qk_layernorm="l2",
            chunk_size=3,
            temperature_tuning=TemperatureConfig(floor_scale=2, attn_scale=0.5, position_offset=1, layers="nope"),
        ),
        layer_types=("chunked", "nope"),
    ),
    "gated_channels": tiny(attention=heads(v_head_dim=12, output_gate=True, value_scale=0.7)),
    "gated_channels_biases": tiny(attention=heads(None, add_qkv_bias=True, output_gate=True)),
    "gated_heads": tiny(
        attention=heads(qk_layernorm="head", output_gate=True, output_gate_by="head", output_gate_activation="softplus")
    ),
    "gated_latent": tiny(attention=heads(None, mla=MLAConfig(**LATENT), output_gate=True, output_gate_by="head")),
    "keys_are_values": tiny(attention=heads(qk_layernorm="head", key_is_value=True)),
    "keys_of_earlier_layers": tiny(
        num_layers=4,
        attention=heads(qk_layernorm="head", window_size=5),
        layer_types=("sliding", "full", "sliding", "full"),
        kv_source_layers=(0, 1, 0, 1),
    ),
    "several_attentions": tiny(
        num_layers=3,
        mixers={
            "sliding": AttentionConfig(
                num_attention_heads=8,
                num_query_groups=4,
                kv_channels=6,
                v_head_dim=10,
                window_size=5,
                sinks=True,
                output_gate=True,
                rope=RopeConfig(rotary_base=100.0),
            )
        },
        layer_mixers=("attention", "sliding", "sliding"),
        mlp_layers=(0, 2),
    ),
    "moe_on_input": tiny_moe(
        RouterConfig(score="sigmoid", score_after_topk=True, normalize=False, apply_on_input=True)
    ),
    "moe_parallel": tiny_moe().replace(block="parallel"),
    "beside_an_mlp": tiny(
        block="sandwich",
        moe=MoEConfig(
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=24,
            shared_expert_intermediate_size=40,
            own_norms=True,
            router=RouterConfig(normed_input=True, expert_scale=True),
        ),
        layer_scalar=True,
        attention=heads(value_layernorm=True),
    ),
    "alternating_updates": tiny(
        block="sandwich",
        alternating_updates=AlternatingUpdatesConfig(lanes=3),
        laurel_rank=6,
        per_layer_embedding=PerLayerEmbeddingConfig(vocab_size=VOCAB, channels=6),
        ffn_hidden_sizes=(40, 48),
    ),
    "compressed": tiny(
        num_layers=3,
        attention=AttentionConfig(**ONE_KEY, compressed=CompressedConfig(**COMPRESSED)),
        mixers={
            "sparse": AttentionConfig(
                **ONE_KEY,
                compressed=CompressedConfig(
                    **COMPRESSED, rate=2, overlap=True, index_topk=2, index_n_heads=12, index_head_dim=8
                ),
            ),
            "heavy": AttentionConfig(**ONE_KEY, compressed=CompressedConfig(**COMPRESSED, rate=4)),
        },
        layer_mixers=("sparse", "attention", "heavy"),
        layer_types=("full", "sliding", "full"),
        rope=RopeConfig(style="interleaved", rotary_percent=0.5),
        hyper_connections=HyperConnectionConfig(lanes=2),
        moe=MoEConfig(
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=24,
            hash_layers=(0,),
            router=RouterConfig(score="sqrtsoftplus", expert_bias=True),
        ),
    ),
    "sparse_gates": tiny(activation_sparsity=(0.7, 0.0)),
}


FURTHER: dict[str, ModelConfig] = {
    "moe_ahead": VARIANTS["moe"].replace(mtp_num_layers=2),
    "tied_latent_ahead": VARIANTS["latent"].replace(
        mtp_num_layers=1, embedding=EmbeddingConfig(share_embeddings_and_output_weights=True)
    ),
}
"""Models with layers that predict further tokens."""


SIZES = {
    "fsdp": "data_parallel_shard_size",
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
FLAGS: dict[str, tuple[str, Any]] = {"sp": ("sequence_parallel", True)}
FLAGS |= {way: ("cp_comm_type", way) for way in ("p2p", "a2a")}
FLAGS |= {
    schedule: ("pipeline_schedule", schedule)
    for schedule in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}


def parallel(layout: str) -> dict[str, Any]:
    """The fields of ParallelConfig that the words of a layout's name stand for, such as "tp2 sp" or "pp2 GPipe"; other
    words stand for none."""
    words = [re.fullmatch("([a-z]+)([0-9]+)", word) or word for word in layout.split()]
    sizes = {SIZES[word[1]]: int(word[2]) for word in words if isinstance(word, re.Match) and word[1] in SIZES}
    return sizes | dict(FLAGS[word] for word in layout.split() if word in FLAGS)


def token_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, [batch, length]."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    """Any consistent configuration, supported by the model or not."""
    number = st.floats(1e-6, 1e6, allow_nan=False)
    heads = draw(st.integers(1, 4))
    attention = AttentionConfig(
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from([None, 1, heads])),
        kv_channels=draw(st.sampled_from([8, 16])),
        add_qkv_bias=draw(st.booleans()),
        qk_layernorm=draw(st.sampled_from(["none", "head", "full", "l2"])),
        softmax_scale=draw(st.none() | number),
        softcap=draw(st.none() | number),
        window_size=draw(st.none() | st.integers(1, 9)),
        temperature_tuning=draw(st.none() | st.builds(TemperatureConfig, floor_scale=number, attn_scale=number)),
        attention_dropout=draw(st.floats(0, 0.9)),
    )
    assert attention.kv_channels is not None
    pairs = attention.kv_channels // 4
    rope = draw(
        st.sampled_from(
            [
                RopeConfig(),
                RopeConfig(style="interleaved", rotary_percent=0.5),
                RopeConfig(scaling="linear", factor=4.0),
                RopeConfig(scaling="yarn", factor=4.0, truncate=False, mscale=0.7),
                RopeConfig(scaling="longrope", short_factor=(1.0, 2.0) * pairs, long_factor=(3.0, 4.5) * pairs),
            ]
        )
    )
    layers = draw(st.integers(1, 3))
    moe = None
    if draw(st.booleans()):
        moe = MoEConfig(
            num_moe_experts=4,
            moe_router_topk=draw(st.integers(1, 4)),
            moe_ffn_hidden_size=8,
            layers=draw(st.none() | st.just(()) | st.just((layers - 1,))),
            shared_expert_intermediate_size=draw(st.none() | st.integers(1, 9)),
            aux_loss_coeff=draw(st.floats(0, 1)),
            router=RouterConfig(score=draw(st.sampled_from(["softmax", "sigmoid"])), scaling_factor=draw(number)),
        )
    return ModelConfig(
        vocab_size=draw(st.integers(1, 99)),
        hidden_size=draw(st.integers(1, 99)),
        num_layers=layers,
        max_position_embeddings=draw(st.integers(1, 99)),
        attention=attention,
        mlp=MLPConfig(ffn_hidden_size=draw(st.integers(1, 99)), clamp=draw(st.none() | number)),
        rope=rope,
        moe=moe,
        embedding=EmbeddingConfig(
            multiplier=draw(st.just("sqrt_hidden_in_weight_dtype") | number),
            embedding_dropout=draw(st.none() | st.floats(0, 0.9)),
            padding_idx=draw(st.none() | st.just(0)),
        ),
        block=draw(st.sampled_from(["pre", "post", "sandwich", "parallel", "parallel_shared_norm"])),
        residual_multiplier=draw(number),
    )


def weight_quantizers() -> dict[str, Quantizer]:
    """A quantizer per format and variant, by a short name."""
    return {
        "float8": Float8CurrentScalingQuantizer(),
        "float8_block": Float8BlockQuantizer(),
        "float8_block_1d": Float8BlockQuantizer(block_scaling_dim=1),
        "mxfp8": MXFP8Quantizer(),
        "mxfp8_2d": MXFP8Quantizer(two_dimensional=True),
        "nvfp4": NVFP4Quantizer(with_2d_quantization=True),
        "nvfp4_1d": NVFP4Quantizer(),
        "identity": IdentityQuantizer(),
        "hybrid": HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=Float8BlockQuantizer()),
    }
