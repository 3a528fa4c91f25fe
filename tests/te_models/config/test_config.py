"""ModelConfig: exact round trips, defaults that depend on other fields, and refusals that name the field."""

import dataclasses
import json

import pytest
from hypothesis import given, settings

from te_models import (
    AttentionConfig,
    ConfigError,
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
from tests.build import VARIANTS, heads, model_configs, tiny, tiny_moe
from tests.covering import examples


def latent(**changes: int) -> AttentionConfig:
    return heads(None, mla=MLAConfig(**changes))


@settings(deadline=None, max_examples=examples(100))
@given(model_configs())
def test_json_round_trip_is_exact(config: ModelConfig) -> None:
    again = ModelConfig.from_json(config.to_json())
    assert again == config and hash(again) == hash(config)
    assert again.to_json() == config.to_json()
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_configs_are_values() -> None:
    config = tiny()
    assert config == tiny() and len({*VARIANTS.values()}) == len(VARIANTS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3
    assert config.replace(num_layers=2) == config


def test_dependent_defaults() -> None:
    config = tiny(num_layers=3)
    assert config.attention.kv_channels == 8 and config.layer_types == ("full",) * 3
    assert heads(None).num_query_groups == 4
    windowed = tiny(attention=heads(None, window_size=5))
    assert windowed.layer_types == ("sliding",) * 2 and tiny_moe().moe.layers == (0, 1)
    mixed = tiny_moe(layers=(1,))
    assert [mixed.is_moe_layer(i) for i in range(2)] == [False, True] and not tiny().is_moe_layer(0)


def test_rope_of_each_layer() -> None:
    config = VARIANTS["mixed_layers"]
    assert config.rope_of(0) == config.rope_sliding and config.rope_of(1) == config.rope
    assert config.rope_of(2) is None and VARIANTS["no_positions"].rope_of(0) is None


def test_lists_become_tuples_and_integers_become_floats() -> None:
    config = tiny(layer_types=["full", "nope"], residual_multiplier=1)
    assert config.layer_types == ("full", "nope") and type(config.residual_multiplier) is float


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: tiny(vocab_size=0), "vocab_size is 0"),
        (lambda: tiny(num_layers=2001), "num_layers is 2001; allowed: at most 2000"),
        (lambda: tiny(num_layers=True), "ModelConfig.num_layers is True; allowed: an integer"),
        (lambda: tiny(hidden_size=32.0), "ModelConfig.hidden_size is 32.0; allowed: an integer"),
        (lambda: tiny(layer_blocks=("pre",)), "the number of layer_blocks is 1; allowed: num_layers = 2"),
        (lambda: tiny(layer_blocks=("pre", "parallel")), "layer_blocks is 'parallel'; allowed: 'pre', 'post', 'sandw"),
        (lambda: tiny(block="parallel", layer_blocks=("pre", "post")), "layer_blocks is 'parallel'; allowed: 'pre'"),
        (lambda: tiny(block="prenorm"), "ModelConfig.block is 'prenorm'; allowed: 'pre', 'post'"),
        (lambda: tiny(hidden_size=30), "attention.kv_channels is None; allowed: a number"),
        (lambda: tiny(layer_types=("full",)), "layer_types .* one entry for each of the 2 layers"),
        (lambda: tiny(layer_types=("full", "sliding")), "attention.window_size is None"),
        (lambda: tiny(layer_types=("full", "chunked")), "attention.chunk_size is None"),
        (lambda: tiny(layer_types=("full", "local")), r"layer_types\[1\] is 'local'"),
        (lambda: tiny(rope=RopeConfig(rotary_percent=0.9)), "rope.rotary_percent is 0.9"),
        (lambda: tiny(rope=RopeConfig(rotary_percent=0.7)), "rope.rotary_percent is 0.7"),  # 5 of 8 channels
        (lambda: tiny(rope=RopeConfig(rotary_percent=0.1)), "rope.rotary_percent is 0.1"),
        (lambda: tiny(rope_sliding=RopeConfig(rotary_percent=0.9)), "rope_sliding.rotary_percent is 0.9"),
        (
            lambda: tiny(attention=latent(qk_pos_emb_head_dim=7)),
            "rope.rotary_percent is 1.0; .* of the 7 head channels",
        ),
        (lambda: tiny(init_method_std=-0.02), "init_method_std is -0.02; allowed: zero or a positive number"),
        (lambda: EmbeddingConfig(logits_softcap=0), "embedding.logits_softcap is 0.0; allowed: a positive number"),
        (lambda: tiny(mlp={"ffn_hidden_size": 4, "gate": True}), "MLPConfig has no field 'gate'"),
        (lambda: tiny(mlp={}), "MLPConfig needs the field 'ffn_hidden_size'"),
        (lambda: tiny(mlp=None), "ModelConfig.mlp is None"),
        (lambda: tiny(residual_multiplier=float("nan")), "residual_multiplier is nan; allowed: a finite number"),
        (lambda: heads(3), "attention.num_query_groups is 3"),
        (lambda: heads(None, softcap=0), "attention.softcap is 0.0"),
        (lambda: heads(None, temperature_tuning=(1.0,)), "temperature_tuning"),
        (lambda: TemperatureConfig(floor_scale=0, attn_scale=1), "temperature.floor_scale is 0.0"),
        (lambda: heads(None, mla=MLAConfig(), sinks=True), "attention.mla is MLAConfig"),
        (lambda: heads(None, qk_layernorm_bias=True), "qk_layernorm_bias is True"),
        (
            lambda: tiny(attention=heads(None, qk_layernorm="head", qk_layernorm_bias=True)),
            "qk_layernorm_bias is True; allowed: false with RMSNorm",
        ),
        (lambda: MLAConfig(q_lora_rank=0), "mla.q_lora_rank is 0"),
        (lambda: heads(None, attention_dropout=1.0), "attention_dropout is 1.0"),
        (lambda: MLAConfig(kv_lora_rank=0), "mla.kv_lora_rank is 0"),
        (lambda: NormConfig(layernorm_epsilon=0), "norm.layernorm_epsilon is 0.0"),
        (lambda: NormConfig(bias=True), "norm.bias is True; allowed: false with RMSNorm"),
        (lambda: NormConfig(normalization="LayerNorm", bias=True, has_weight=False), "norm.bias is True"),
        (lambda: RopeConfig(scaling="linear"), "rope.factor is None; allowed: a value"),
        (lambda: RopeConfig(factor=2.0), "rope.factor is 2.0; allowed: null, because rope.scaling is 'none'"),
        (
            lambda: RopeConfig(scaling="dynamic", factor=2.0, original_max_position_embeddings=0),
            "embeddings is 0; allowed: a positive",
        ),
        (lambda: RopeConfig(scaling="dynamic"), "rope.factor is None; allowed: a value, or one of rope.alpha"),
        (
            lambda: tiny(rope=RopeConfig(scaling="longrope", short_factor=(1.0,), long_factor=(1.0,))),
            "the number of rope.short_factor is 1; allowed: 4, one for each pair of the 8 channels that are rotated",
        ),
        (lambda: EmbeddingConfig(embedding_dropout=1.0), "embedding.embedding_dropout is 1.0; allowed: 0 <= p < 1"),
        (lambda: tiny(embedding=EmbeddingConfig(padding_idx=99)), "embedding.padding_idx is 99; allowed: 0 to"),
        (lambda: tiny(embedding=EmbeddingConfig(padding_idx=-1)), "embedding.padding_idx is -1; allowed: 0 to"),
        (lambda: RopeConfig(scaling="ntk"), "RopeConfig.scaling is 'ntk'"),
        (lambda: MLPConfig(ffn_hidden_size=4, activation="swish"), "MLPConfig.activation is 'swish'"),
        (lambda: MLPConfig(ffn_hidden_size=4, clamp=-1.0), "mlp.clamp is -1.0"),
        (lambda: RouterConfig(num_groups=2), "router.topk_groups is None"),
        (lambda: RouterConfig(num_groups=2, topk_groups=3), "router.topk_groups is 3; allowed: 1..num_groups = 2"),
        (lambda: tiny_moe(moe_router_topk=5), "moe.moe_router_topk is 5; allowed: 1..num_moe_experts = 4"),
        (lambda: tiny_moe(aux_loss_coeff=-0.01), "moe.aux_loss_coeff is -0.01; allowed: zero or a positive number"),
        (lambda: tiny_moe(z_loss_coeff=-1), "moe.z_loss_coeff is -1.0"),
        (lambda: RouterConfig(normalize_eps=-1), "router.normalize_eps is -1.0"),
        (lambda: tiny_moe(layers=(1, 0)), "moe.layers"),
        (lambda: tiny_moe(layers=(2,)), "moe.layers"),
        (lambda: tiny_moe(shared_expert_gate=True), "moe.shared_expert_gate is True"),
        (lambda: tiny_moe(RouterConfig(num_groups=3, topk_groups=1)), "router.num_groups is 3"),
        (
            lambda: tiny_moe(RouterConfig(num_groups=4, topk_groups=1), num_moe_experts=8, moe_router_topk=3),
            "router.topk_groups is 1; allowed: so many groups of 2 that they have moe_router_topk = 3 experts",
        ),
        (lambda: EmbeddingConfig(multiplier="sqrt"), "EmbeddingConfig.multiplier is 'sqrt'"),
        (lambda: ModelConfig.from_json("{"), "not valid JSON"),
        (lambda: ModelConfig.from_json("[]"), r"ModelConfig is \[\]"),
        (lambda: MoEConfig.from_dict({"num_moe_experts": 4}), "MoEConfig needs the field 'moe_router_topk'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(build, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build()
