"""Configuration maps: legacy and current spellings, defaults as transformers has them, round trips, and fuzzing."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from te_models.checkpoints import FAMILIES, CheckpointError
from te_models.checkpoints.families.base.text_part import text_part
from te_models.checkpoints.folder.hf_config import export_config
from te_models.checkpoints.folder.te_folder import HFSource, TEFolder
from te_models.checkpoints.io.strict_json import parse_object
from te_models.config import MLPConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig
from tests.build import heads, tiny
from tests.checkpoints.hf_cases import CASES, LLAMA3_ROPE, SMALL, YARN_ROPE, plain, transformers
from tests.covering import examples

NEEDED = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2},
    "gemma3n": {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 64},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "glm5_next": {"num_key_value_heads": 32},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "helium": {"num_attention_heads": 20},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
"""Fields for which a family's class has no usable default."""


def read(family: str = "llama", **fields: Any) -> ModelConfig:
    part = text_part(FAMILIES[family])
    return FAMILIES[family].read_config(SMALL | fields if part is None else {"text_config": SMALL | fields} | fields)


def without_rope(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != "rope_parameters"}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kimi_k2"])
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A config.json with only the sizes means the same as one in which transformers spelled out all its defaults."""
    sizes = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    sizes |= {"num_attention_heads": 32, "hidden_size": 256}  # the key/value heads of every default divide 32
    if family == "gpt2":
        sizes = {"vocab_size": 61, "n_embd": 256, "n_layer": 2, "n_head": 32}
    sizes |= NEEDED.get(family, {})
    part = text_part(FAMILIES[family])
    if part is not None:
        sizes = {"text_config": {**sizes, "model_type": part.families[-1].model_type}, "tie_word_embeddings": False}
    spelled_out = transformers.AutoConfig.for_model(family, **deepcopy(sizes)).to_dict()
    assert FAMILIES[family].read_config(sizes) == FAMILIES[family].read_config(spelled_out)


NULLS = {
    **dict.fromkeys(("llama", "gemma2", "gemma3_text", "phi", "flex_olmo", "deepseek_v3"), ("attention_dropout",)),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"), ("attention_dropout", "output_router_logits", "router_aux_loss_coef")
    ),
    "ernie4_5_moe": ("use_bias", "output_router_logits", "router_aux_loss_coef"),
}
"""Fields that transformers takes as null, with which its models compute as without them."""


@pytest.mark.parametrize("family", NULLS)
def test_null_means_the_default_and_comes_back(family: str) -> None:
    for name in NULLS[family]:
        hf = {"model_type": family, **SMALL, **NEEDED.get(family, {}), name: None}
        assert transformers.AutoConfig.for_model(**hf).to_dict()[name] is None
        config = FAMILIES[family].read_config(hf)
        assert config == FAMILIES[family].read_config({n: v for n, v in hf.items() if n != name}), name
        exported = export_config(config, HFSource(family, hf, "BF16"), FAMILIES[family], "BF16")
        assert exported[name] is None and exported.keys() == hf.keys() | {"dtype"}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("granitemoe", {"embedding_multiplier": None}),
        ("granitemoeshared", {"logits_scaling": None}),
        ("ernie4_5_moe", {"moe_norm_min": None}),
        ("ernie4_5_moe", {"router_aux_loss_coef": None, "output_router_logits": True}),
        ("llama", {"hidden_size": None}),
        ("glm4", {"partial_rotary_factor": None}),
        ("glm4_moe", {"partial_rotary_factor": None}),
        ("phi", {"partial_rotary_factor": None}),
    ],
)
def test_null_is_refused_where_transformers_cannot_compute_with_it(family: str, fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(fields))} = None, which is not"):
        read(family, **fields)


@pytest.mark.parametrize("case", CASES)
def test_reading_what_was_written_gives_the_same_model(case: str) -> None:
    config_class, options = CASES[case]
    hf = json.loads(getattr(transformers, config_class)(**(SMALL | options)).to_json_string())
    family = FAMILIES[hf["model_type"]]
    config = family.read_config(hf)
    written = family.write_config(config)
    assert family.read_config(json.loads(json.dumps(written))) == config
    again = getattr(transformers, config_class)(**written).to_dict()
    before = getattr(transformers, config_class)(**(SMALL | options)).to_dict()
    known = family.known - {"router_aux_loss_coef"}
    for name in known & before.keys():
        if name == "max_window_layers" and not before["use_sliding_window"]:
            continue  # has no effect without a window
        if name == "head_dim" and before[name] is None:
            continue  # written out
        assert plain(again[name]) == plain(before[name]), name


@pytest.mark.parametrize(
    ("legacy", "current"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
            {"rope_parameters": LLAMA3_ROPE},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            {"rope_parameters": YARN_ROPE},
        ),
        ({"rope_scaling": None, "rope_theta": 1e4}, {}),
        ({"rope_parameters": None}, {}),
    ],
)
def test_legacy_rope_means_the_same(legacy: dict[str, Any], current: dict[str, Any]) -> None:
    assert read(**legacy) == read(**current)
    theirs = [transformers.LlamaConfig(**(SMALL | deepcopy(fields))).rope_parameters for fields in (legacy, current)]
    theirs[0].pop("type", None)  # kept beside rope_type
    assert theirs[0] == theirs[1], "transformers agrees that both mean the same"


def test_legacy_rope_of_gemma3_and_olmo3() -> None:
    """What old files say of scaling is true of the full layers; transformers agrees, but for olmo3's one base."""
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    linear = {"rope_type": "linear", "factor": 8.0}
    legacy = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    nested = {
        "full_attention": {**linear, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert read("gemma3_text", **kinds, **legacy) == read("gemma3_text", **kinds, rope_parameters=nested)
    theirs = transformers.AutoConfig.for_model("gemma3_text", **SMALL, **kinds, **deepcopy(legacy))
    assert theirs.rope_parameters == nested
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
    legacy = {"rope_theta": 2e6, "rope_scaling": yarn}
    nested = {
        "full_attention": {**yarn, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e6},
    }
    assert read("olmo3", **kinds, **legacy) == read("olmo3", **kinds, rope_parameters=nested)
    theirs = transformers.AutoConfig.for_model("olmo3", **SMALL, **kinds, **deepcopy(legacy))
    assert theirs.rope_parameters == {**nested, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    # the older spelling of the kind; and both forms in one file
    older = {"type": "linear", "factor": 8.0}
    assert read("gemma3_text", **kinds, rope_scaling=older) == read("gemma3_text", **kinds, rope_scaling=linear)
    both = read("olmo3", **kinds, rope_parameters=nested, rope_scaling={"factor": 4.0})
    theirs = transformers.AutoConfig.for_model(
        "olmo3", **SMALL, **kinds, rope_parameters=deepcopy(nested), rope_scaling={"factor": 4.0}
    )
    assert both == read("olmo3", **kinds, rope_parameters=theirs.rope_parameters)
    assert (both.rope.scaling, both.rope.factor, both.rope.attention_factor) == ("yarn", 4.0, 1.2)


def test_names_that_only_some_families_know() -> None:
    for family in ("gemma2", "gpt_oss", "olmo3"):
        assert read(family, num_hidden_layers=4, sliding_window_pattern=3) == read(family, num_hidden_layers=4)
    for family in ("gemma3_text", "cohere2", "exaone_moe"):
        kinds = read(family, num_hidden_layers=4, sliding_window_pattern=3).layer_types
        assert kinds is not None and [kind == "sliding" for kind in kinds] == [True, True, False, True]
    older = read("gpt_neox", rotary_emb_base=500, rotary_pct=0.5, rope_theta=1e4, partial_rotary_factor=0.25)
    assert (older.rope.rotary_base, older.rope.rotary_percent) == (500.0, 0.5)


def test_rope_values() -> None:
    rope = read(rope_parameters=LLAMA3_ROPE).rope
    assert rope == RopeConfig(
        rotary_base=5e5,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    yarn = read(rope_parameters=YARN_ROPE).rope
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = read(rope_parameters=longrope, original_max_position_embeddings=32).rope
    assert (rope.factor, rope.original_max_position_embeddings, rope.long_factor) == (4.0, 32, (2.0,) * 4)
    assert read("mixtral").rope.rotary_base == 1e6


def test_a_length_outside_rope_parameters_counts_for_the_queries_too() -> None:
    config = read("ministral3", original_max_position_embeddings=64)
    assert config.rope.original_max_position_embeddings == 64
    assert config.attention.temperature_tuning.floor_scale == 64.0
    assert FAMILIES["ministral3"].read_config(FAMILIES["ministral3"].write_config(config)) == config


def test_windows() -> None:
    assert read("mistral").attention.window_size == 4096
    assert read("mistral", sliding_window=None).layer_types == ("full", "full")
    assert read("mistral", sliding_window=7).layer_types == ("sliding", "sliding")
    assert read("mixtral").attention.window_size is None and read("qwen2").layer_types == ("full", "full")
    partly = read("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1)
    assert (partly.layer_types, partly.attention.window_size) == (("full", "sliding"), 9)
    given = read("qwen3", use_sliding_window=True, layer_types=["sliding_attention", "full_attention"])
    assert given.layer_types == ("sliding", "full")
    assert read("qwen3_moe", use_sliding_window=True, sliding_window=5).layer_types == ("sliding", "sliding")
    with pytest.raises(CheckpointError, match="use_sliding_window is not true"):
        read("qwen2", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(CheckpointError, match="use_sliding_window is not true"):
        read("smollm3", layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    with pytest.raises(CheckpointError, match="3 layer_types and 2 no_rope_layers"):
        read("smollm3", layer_types=["full_attention"] * 3)
    with pytest.raises(CheckpointError, match="layer type 'chunked_attention'"):
        read("qwen2", layer_types=["chunked_attention", "full_attention"])


def test_published_spellings_of_gpt_neox_20b_and_hunyuan_a13b() -> None:
    older = {"hidden_act": "gelu_fast", "rotary_emb_base": 10000, "rotary_pct": 0.25}
    assert read("gpt_neox", **older).mlp.activation == "gelu_tanh"
    layers = SMALL["num_hidden_layers"]
    off = {"n_group": False, "topk_group": False, "routed_scaling_factor": False, "use_cla": False, "use_qk_norm": True}
    published = {"num_experts": 4, "moe_topk": [2] * layers, "num_shared_expert": [1] * layers, **off}
    assert read("hunyuan_v1_moe", **published) == read("hunyuan_v1_moe", num_experts=4, moe_topk=2)
    for name, value in (("use_qk_norm", False), ("use_cla", True), ("n_group", 2), ("routed_scaling_factor", 0)):
        with pytest.raises(CheckpointError, match=f"{name} = {value}; supported"):
            read("hunyuan_v1_moe", **{**published, name: value})


def test_published_fields_of_qwen3_coder_and_llama_4_scout() -> None:
    coder = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "max_window_layers": 62}
    assert read("qwen3_moe", **coder) == read("qwen3_moe")
    for number, flag in ((4, True), (0, False)):
        hf = {"model_type": "llama4_text", **SMALL, "attn_temperature_tuning": number}
        config = read("llama4_text", attn_temperature_tuning=flag)
        assert FAMILIES["llama4_text"].read_config(hf) == config
        exported = export_config(config, HFSource("llama4_text", hf, "BF16"), FAMILIES["llama4_text"], "BF16")
        assert exported["attn_temperature_tuning"] == number
    with pytest.raises(CheckpointError, match=r"attn_temperature_tuning = 4\.5, which is not true or false"):
        read("llama4_text", attn_temperature_tuning=4.5)


def test_gelu_of_gemma_is_the_tanh_form() -> None:
    """Published files: gemma-7b-it says the first, gemma-7b the second, gemma-1.1 the third."""
    for names in (("gelu", None), ("gelu", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh", None)):
        config = read("gemma", **dict(zip(("hidden_act", "hidden_activation"), names)))
        assert config.mlp.activation == "gelu_tanh"
        assert FAMILIES["gemma"].write_config(config)["hidden_act"] == "gelu_pytorch_tanh"
    exact = read("gemma", hidden_act="gelu_pytorch_tanh", hidden_activation="gelu")
    assert exact.mlp.activation == "gelu"
    assert FAMILIES["gemma"].read_config(FAMILIES["gemma"].write_config(exact)) == exact
    with pytest.raises(CheckpointError, match="hidden_activation = 'gelu2'; supported"):
        read("gemma", hidden_activation="gelu2")


def test_cohere2_without_a_window_and_a_cap_of_gemma3() -> None:
    assert read("cohere2", sliding_window=None).layer_types == ("nope", "nope")
    assert read("exaone_moe", sliding_window=None).layer_types == ("full", "full")
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping = 50\.0; supported: None"):
        read("gemma3_text", attn_logit_softcapping=50.0)


def test_experts() -> None:
    moe = read("qwen3_moe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=4).moe
    assert moe.router.normalize and moe.layers == (0, 1, 2, 3)
    assert read("qwen3_moe", num_local_experts=16).moe == read("qwen3_moe", num_experts=16).moe
    every_other = read("qwen3_moe", decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3])
    assert every_other.moe.layers == (1,)
    with pytest.raises(CheckpointError, match="num_experts = 4 and num_local_experts = 8"):
        read("qwen3_moe", num_experts=4, num_local_experts=8)
    loss = read("mixtral", router_aux_loss_coef=0.5, output_router_logits=True).moe
    assert loss.aux_loss_coeff == 0.5
    with pytest.raises(CheckpointError, match=r"router_jitter_noise = 0\.1"):
        read("mixtral", router_jitter_noise=0.1)


MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=128,
    attention=heads(None),
    mlp=MLPConfig(ffn_hidden_size=48),
)


@pytest.mark.parametrize(
    ("config", "family", "field"),
    [
        (MODEL.replace(residual_multiplier=0.5), "llama", "residual_multiplier = 0.5"),
        (MODEL.replace(mlp=MLPConfig(ffn_hidden_size=48, gated=False)), "llama", "mlp.gated = False"),
        (MODEL.replace(attention=MODEL.attention.replace(add_qkv_bias=True)), "llama", "attention.add_output_bias"),
        (MODEL.replace(attention=MODEL.attention.replace(softcap=50.0)), "qwen2", "attention.add_qkv_bias"),
        (MODEL.replace(rope=RopeConfig(style="interleaved")), "mistral", "rope.style = 'interleaved'"),
        (MODEL, "mixtral", "this model: config.json has num_local_experts = None"),
        (
            MODEL.replace(
                moe=MoEConfig(
                    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48, router=RouterConfig(score="sigmoid")
                )
            ),
            "mixtral",
            "moe.router.score = 'sigmoid'",
        ),
    ],
)
def test_what_a_family_cannot_express_is_named(config: ModelConfig, family: str, field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        FAMILIES[family].write_config(config)
    assert "cannot express" in str(caught.value) and field in str(caught.value)


def test_training_only_fields_do_not_prevent_an_export() -> None:
    FAMILIES["llama"].write_config(MODEL.replace(hidden_dropout=0.1, init_method_std=0.5))


interesting = sorted({name for f in FAMILIES.values() for name in f.known})
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.sampled_from(["silu", "yarn", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
changes = st.dictionaries(st.sampled_from(interesting), values, max_size=4)


def check_config(family: str, fields: dict[str, Any]) -> None:
    """Only CheckpointError escapes; what is accepted can be written and read again."""
    try:
        config = read(family, **fields)
    except CheckpointError:
        return
    assert FAMILIES[family].read_config(FAMILIES[family].write_config(config)) == config


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), changes)
def test_any_config(family: str, fields: dict[str, Any]) -> None:
    check_config(family, fields)


@pytest.mark.slow
@settings(max_examples=10_000, derandomize=False, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), changes)
def test_any_config_thoroughly(family: str, fields: dict[str, Any]) -> None:
    check_config(family, fields)


def paths_of(values: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """List the places of a nested dictionary."""
    below = [p for k, v in values.items() for p in paths_of(v, (*path, k))] if isinstance(values, dict) else []
    return [*([path] if path else []), *below]


FOLDER = TEFolder("grouped", MODEL, HFSource("llama", SMALL, "BF16"))
PLACES = paths_of(json.loads(FOLDER.to_bytes()))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.just(10**400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), anything), min_size=1, max_size=3))
def test_any_config_of_ours(edits: list[tuple[tuple[str, ...], Any]]) -> None:
    """Only CheckpointError escapes from our own config.json; what is accepted survives a round trip."""
    changed = json.loads(FOLDER.to_bytes())
    for (*parents, leaf), value in edits:
        place: Any = changed
        for name in parents:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[leaf] = value
    try:
        folder = TEFolder.from_dict(parse_object(json.dumps(changed).encode(), "config.json"))
    except CheckpointError:
        return
    assert TEFolder.from_dict(parse_object(folder.to_bytes(), "config.json")) == folder


def test_what_no_family_writes_is_told_of_each() -> None:
    """An activation that a family has no name for is an obstacle in words, whichever family is asked."""
    for activation in ("gelu", "gelu_tanh", "relu", "squared_relu", "xielu"):
        config = tiny(mlp=MLPConfig(ffn_hidden_size=48, activation=activation, gated=False))
        for family in FAMILIES.values():
            assert "cannot express" in family.distance(config)[1], family.model_type
