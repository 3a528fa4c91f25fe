"""`ConfigPart.replace`: what a constructor makes of the fields that were given and the changes, or a refusal."""

import copy
import dataclasses
import pickle
import re
from functools import cache, reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from te_models import AttentionConfig, ConfigError, MLAConfig, ModelConfig, MoEConfig
from te_models.checkpoints import FAMILIES
from te_models.checkpoints.families.base.text_part import text_part
from te_models.config import ConfigPart
from tests.build import LATENT, VARIANTS, heads, tiny, tiny_moe
from tests.checkpoints.hf_cases import SMALL
from tests.covering import examples

NEEDED = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mamba2": {"num_heads": 8, "head_dim": 64},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "helium": {"num_attention_heads": 20},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma3n": {"num_kv_shared_layers": 0},
}
SIZES = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
SIZES |= {"num_attention_heads": 32, "hidden_size": 256}


@cache
def configs() -> dict[str, ModelConfig]:
    """One configuration of every family, as its folder is read, and every variant of the tests."""
    found: dict[str, ModelConfig] = dict(VARIANTS)
    for family in FAMILIES:
        sizes = SIZES | NEEDED.get(family, {})
        part = text_part(FAMILIES[family])
        if part is not None:
            sizes = {"text_config": {**sizes, "model_type": part.families[-1].model_type}, "tie_word_embeddings": False}
        found[family] = FAMILIES[family].read_config(sizes)
    return found


def parts(config: ConfigPart, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], ConfigPart]:
    """The parts of a configuration by their path, itself under ()."""
    found = {path: config}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, ConfigPart):
            found |= parts(value, (*path, f.name))
    return found


@cache
def pool(where: tuple[str, ...], name: str) -> list[Any]:
    """The values that a field has in all configurations."""
    found = [part for config in configs().values() for path, part in parts(config).items() if path == where]
    return list({repr(v): v for v in (getattr(part, name, None) for part in found)}.values())


def replaced(config: Any, path: tuple[str, ...], value: Any) -> Any:
    first, *rest = path
    return config.replace(**{first: replaced(getattr(config, first), tuple(rest), value) if rest else value})


def afresh(values: dict[str, Any], path: tuple[str, ...], value: Any) -> ModelConfig:
    """A configuration of the same fields, with what derives from others left out, and one changed."""
    values = copy.deepcopy(values)
    a, moe, layers = values.get("attention"), values["moe"], range(values["num_layers"])
    kind = "full" if a is None or a["window_size"] is None else "sliding"
    if values["layer_types"] == [kind for _ in layers]:
        values["layer_types"] = None
    if a is not None and a["num_query_groups"] == a["num_attention_heads"]:
        a["num_query_groups"] = None
    if a is not None and a["mla"] is not None:
        a["kv_channels"] = a["v_head_dim"] = None
    elif a is not None and a["kv_channels"] == values["hidden_size"] / a["num_attention_heads"]:
        a["kv_channels"] = None
    if moe is not None and moe["layers"] == list(layers):
        moe["layers"] = None
    reduce(lambda part, name: part[name], path[:-1], values)[path[-1]] = value
    return ModelConfig.from_dict(values)


def outcome(build: Any) -> ModelConfig | str:
    try:
        return build()
    except ConfigError as error:
        assert re.match(r"(the \w+ of (a )?)?[\w.]+(\[\d+\])? (is|has|needs) .", str(error)), error
        assert "\n" not in str(error)
        return str(error)


ODD = [None, 0, -1, 1, 2, 3, 4, 7, 8, 64, True, False, 0.5, "x", [], [0], ["full"], ["sliding", "full"], {}]


@settings(deadline=None, max_examples=examples(100))
@given(st.data())
def test_replacing_a_field_is_constructing_afresh(data: st.DataObject) -> None:
    config = configs()[data.draw(st.sampled_from(sorted(configs())))]
    config = data.draw(st.sampled_from([config, ModelConfig.from_json(config.to_json())]))
    said = config.to_dict()  # a model without attention says nothing of it
    where = data.draw(st.sampled_from(sorted(path for path in parts(config) if not path or path[0] in said)))
    part = parts(config)[where]
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(part)]))
    value = data.draw(st.sampled_from([*ODD, *pool(where, name)]))
    plain = value.to_dict() if isinstance(value, ConfigPart) else value
    got = outcome(lambda: replaced(config, (*where, name), plain))
    new = outcome(lambda: afresh(config.to_dict(), (*where, name), plain))
    assert isinstance(got, str) == isinstance(new, str), (got, new)
    if isinstance(got, ModelConfig):
        assert got == new and ModelConfig.from_json(got.to_json()) == got
        assert ModelConfig.from_json(got.to_json()).to_json() == got.to_json()


@settings(deadline=None, max_examples=examples(100))
@given(st.data())
def test_given_fields_stay_and_derived_ones_follow(data: st.DataObject) -> None:
    """With what was given known exactly: also where a given value is the one that would be derived."""
    heads, layers = st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3])
    attention = {
        "num_attention_heads": data.draw(heads),
        "num_query_groups": data.draw(st.sampled_from([None, 1, 2, 4])),
        "kv_channels": data.draw(st.sampled_from([None, 8, 16, 32])),
        "window_size": data.draw(st.sampled_from([None, 3])),
    }
    number = data.draw(layers)
    kinds = st.sampled_from([None, ("full",) * number, ("sliding",) * number])
    moe = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
    moe["layers"] = data.draw(st.sampled_from([None, tuple(range(number)), (0,)]))
    whole = {"hidden_size": data.draw(st.sampled_from([32, 64])), "num_layers": number, "layer_types": data.draw(kinds)}

    def build() -> ModelConfig:
        return tiny(**whole, attention=AttentionConfig(**attention), moe=MoEConfig(**moe))

    config = outcome(build)
    if isinstance(config, str):
        return
    config = data.draw(st.sampled_from([config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)]))
    changed = {"hidden_size": st.sampled_from([32, 64, 128]), "num_layers": layers, "num_attention_heads": heads}
    name = data.draw(st.sampled_from(sorted(changed)))
    value = data.draw(changed[name])
    if name == "num_attention_heads":
        attention[name] = value
        got = outcome(lambda: config.replace(attention=config.attention.replace(**{name: value})))
    else:
        whole[name] = value
        got = outcome(lambda: config.replace(**{name: value}))
    assert got == outcome(build)


def test_layers_follow_their_number() -> None:
    config = tiny_moe().replace(num_layers=4)
    assert config.layer_types == ("full",) * 4 and config.moe.layers == (0, 1, 2, 3)
    assert ModelConfig.from_json(tiny_moe().to_json()).replace(num_layers=4) == config
    windowed = tiny(attention=heads(None, window_size=5))
    assert windowed.replace(attention=windowed.attention.replace(window_size=None)).layer_types == ("full",) * 2
    assert tiny(hidden_size=32).replace(hidden_size=64).attention.kv_channels == 16
    assert AttentionConfig(num_attention_heads=2).replace(num_attention_heads=4).num_query_groups == 4


def test_parts_carry_what_they_derived_into_other_models() -> None:
    assert tiny(num_layers=4, moe=tiny_moe().moe).moe.layers == (0, 1, 2, 3)
    assert tiny(hidden_size=64, attention=tiny(hidden_size=32).attention).attention.kv_channels == 16
    latent = heads(None, mla=MLAConfig(**LATENT))
    assert latent.replace(mla=latent.mla.replace(v_head_dim=10)).v_head_dim == 10
    assert (latent.replace(mla=None).kv_channels, latent.replace(mla=None).v_head_dim) == (None, None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: tiny(layer_types=("full", "nope")).replace(num_layers=4), "layer_types is .* each of the 4 layers"),
        (lambda: tiny_moe(layers=(1,)).replace(num_layers=1), r"moe.layers is \(1,\); allowed: .* num_layers = 1"),
        (lambda: tiny().replace(layers=4), "ModelConfig has no field 'layers'"),
        (lambda: tiny().replace(hidden_size=33), "attention.kv_channels is None; allowed: a number"),
        (
            lambda: heads(None, mla=MLAConfig(**LATENT), kv_channels=8),
            "attention.kv_channels is 8; allowed: null or 12, because attention.mla says so",
        ),
    ],
)
def test_a_change_that_does_not_fit_is_refused_by_name(change: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        change()


def test_equal_configs_of_files_are_equal_after_a_change() -> None:
    for config in configs().values():
        again = ModelConfig.from_json(config.to_json())
        assert again == config and again.to_json() == config.to_json()
