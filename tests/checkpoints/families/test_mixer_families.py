"""Families whose layers have several kinds of mixers: what the tests of all families do not do for each of them."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel, generate
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf, inspect, quantize, relayout
from te_models.checkpoints.families import family_of
from te_models.checkpoints.families.missing import MISSING
from tests.checkpoints.families.test_families import assert_close, save, tokens
from tests.checkpoints.family_cases import SIZES, make
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back, transformers
from tests.checkpoints.mixer_cases import MIXERS
from tests.checkpoints.recurrent_cases import RECURRENT

FIRST = {family: case for case, (family, _) in reversed(MIXERS.items())}


@pytest.mark.sentinels("jamba-flags", "lfm2-flags")
@pytest.mark.parametrize("case", [*RECURRENT, "lfm3-flags", "deepseek_v4"])
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(case: str) -> None:
    """transformers' convolutions read biases in place of padding, and its compressed keys padding itself."""
    theirs = make(case)
    ours, ids, mask = GPTModel.from_hf(theirs).eval(), tokens(12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    got, expected = ours(ids, attention_mask=mask).logits, theirs(ids[:1, 5:]).logits
    assert_close(got[:1, 5:], expected)
    assert_close(got[1:], theirs(ids[1:]).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST)
@torch.no_grad()
def test_compiled_decoding_gives_the_same_text(family: str) -> None:
    ours, ids = GPTModel.from_hf(make(FIRST[family])).eval(), tokens(7)
    assert torch.equal(generate(ours, ids, 12, compile=True), generate(ours, ids, 12))


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST)
def test_quantized_folders_in_both_layouts(tmp_path: Path, family: str) -> None:
    import_hf(save(make(FIRST[family]), tmp_path / "hf"), tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "fp8", "current")
    relayout(tmp_path / "fp8", tmp_path / "apart", "per-gemm")
    ids = tokens(9)
    models = [GPTModel.from_pretrained(tmp_path / name).eval() for name in ("fp8", "apart", "plain")]
    fp8, apart, plain = (model(ids).logits for model in models)
    assert torch.equal(fp8, apart) and (fp8 - plain).abs().median() < 0.1 * plain.abs().max()
    relayout(tmp_path / "apart", tmp_path / "together", "grouped")
    assert_same_bits(stored(tmp_path / "fp8"), stored(tmp_path / "together"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("laguna", {"gating": False}, "gating = False; supported: True, 'per-head', 'per-element'"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "1 num_attention_heads_per_layer and 3 layers"),
        ("granite_swa", {"layer_rope_theta": [-1.0, 1.0, 1.0, 1.0]}, "layer_rope_theta = .*; allowed: 0 or more"),
        ("granite_swa", {"layer_rope_theta": [1.0, None, 1.0, 1.0]}, "layer_rope_theta = None"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 5}, "indexer.shared is True; allowed: false in layer 0"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 4}, "4 indexer_types for 5 layers"),
        ("glm_moe_dsa", {"indexer_types": ["half"] * 5}, "the indexer type 'half'; supported: full, shared"),
        (
            "deepseek_v32",
            {"layer_types": ["full_attention"] * 2},
            "the layer type 'full_attention'; supported: indexed",
        ),
        ("deepseek_v32", {"mlp_bias": True}, "mlp_bias = True; supported: False"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "truncate = False in the rope parameters of a layer type, where transformers does not read it",
        ),
        (
            "deepseek_v2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.3}},
            "mscale_all_dim = 1.3 beside the rope type 'linear'; supported: beside 'yarn', or 0",
        ),
        ("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func = 'softmax'; supported: 'sigmoid'"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers = \[1.0\]; allowed: 5 numbers, or null"),
        ("falcon_h1", {"key_multiplier": 0.0}, "key_multiplier = 0.0; allowed: a positive number"),
        ("falcon_h1", {"mamba_d_head": 7}, "mamba_d_head = 7 and 4 heads; allowed: 'auto', or the 48 channels"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset = 3; allowed: 0 or more, below attn_layer_period = 3"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu'"),
        ("minimax", {"rotary_dim": 9}, "rotary_dim = 9 of 8 channels"),
        ("minimax", {"postnorm": False}, "postnorm = False; supported: True"),
        ("zamba2", {"layers_block_type": ["mamba"]}, "layers_block_type = .* and 6 layers; allowed for each"),
        ("zamba2", {"mamba_headdim": 3}, "mamba_headdim = 3; allowed: 16, by other fields"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings = False; supported: True"),
        ("gptj", {"rotary_dim": 9}, "rotary_dim = 9; allowed: 1 to 8, a head's channels"),
        ("gpt_neo", {"attention_types": [[["near"], 2]]}, "attention_types = .* and 2 layers; allowed: lists of"),
        ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1; supported: 0.0"),
        ("llama", {"gating": True}, "gating = True, which changes the model"),
        ("llama", {"attention_value_scale": 0.5}, "attention_value_scale = 0.5, which changes the model"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(family: str, changes: dict, message: str) -> None:
    plain = {**SIZES, "model_type": family}
    values = (json.loads(make(FIRST[family]).config.to_json_string()) if family in FIRST else plain) | changes
    with pytest.raises(CheckpointError, match=message):
        FAMILIES[family].read_config(values)


def test_the_ways_to_say_which_layers_share_an_indexer() -> None:
    family, values = FAMILIES["glm_moe_dsa"], json.loads(make("glm_moe_dsa").config.to_json_string())
    types = values.pop("indexer_types")
    wanted = family.read_config(values | {"indexer_types": types})
    assert wanted.layer_mixers == ("attention", "shared", "attention", "shared", "shared")
    assert family.read_config(values | {"index_topk_pattern": "FSFSS"}) == wanted
    assert family.read_config(values | {"index_topk_pattern": types}) == wanted
    every = family.read_config(values | {"index_topk_freq": 2, "index_skip_topk_offset": 3})
    assert every.layer_mixers == ("attention",) * 3 + ("shared", "attention")
    assert family.read_config(values).layer_mixers is None
    with pytest.raises(CheckpointError, match="index_topk_pattern = 3"):
        family.read_config(values | {"index_topk_pattern": 3})
    dense = {name: value for name, value in values.items() if name != "layer_types"}
    with pytest.raises(CheckpointError, match="index_topk = 7, which changes the model"):
        FAMILIES["deepseek_v3"].read_config(dense)


def test_older_words_for_layers_are_read() -> None:
    values = json.loads(make("glm_moe_dsa").config.to_json_string())
    older = values | {"layer_types": ["deepseek_sparse_attention"] * len(values["layer_types"])}
    assert FAMILIES["glm_moe_dsa"].read_config(older) == FAMILIES["glm_moe_dsa"].read_config(values)


def test_the_published_spelling_of_mimo() -> None:
    """Its config.json has other fields than transformers': a 1 for a window, and for experts."""
    family = FAMILIES["mimo_v2_flash"]
    values = json.loads(make("mimo_v2_flash").config.to_json_string())
    config = family.read_config(values)
    spelled = {"hybrid_layer_pattern": [1, 0, 1], "moe_layer_freq": [0, 1, 1], "sliding_window_size": 4}
    spelled |= {"layernorm_epsilon": values.pop("rms_norm_eps"), "attention_chunk_size": 4}
    spelled |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    heads = {f"swa_{name}": values[name] for name in ("num_attention_heads", "head_dim", "v_head_dim")}
    spelled |= heads | {"swa_num_key_value_heads": 2 * values["num_key_value_heads"]}
    for name in ("layer_types", "mlp_layer_types", "sliding_window"):
        values.pop(name)
    assert family.read_config(values | spelled) == config
    for name in heads:
        with pytest.raises(CheckpointError, match=f"{name} = 3; supported: {values[name.removeprefix('swa_')]}"):
            family.read_config(values | spelled | {name: 3})
    values.pop("rope_parameters")
    older = {"rope_theta": 5e5, "swa_rope_theta": 1e3, "partial_rotary_factor": 0.334}
    older |= {"head_dim": 12, "swa_head_dim": 12}
    ropes = family.read_config(values | spelled | older)
    assert (ropes.rope.rotary_base, ropes.rope_sliding.rotary_base) == (5e5, 1e3)
    assert ropes.rope.rotary_percent == ropes.rope_sliding.rotary_percent == 0.334


@torch.no_grad()
def test_rotary_dim_of_the_published_minimax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first channels of each head rotate, as transformers' minimax_m2 does it; its minimax rotates all."""
    theirs = make("minimax")
    source = save(theirs, tmp_path / "hf")
    values = json.loads((source / "config.json").read_text())
    published = {"rotary_dim": 4, "postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
    (source / "config.json").write_text(json.dumps(values | published))
    import_hf(source, tmp_path / "ours")
    ours = GPTModel.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.rope.rotary_percent == 0.5
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == values | published
    family = FAMILIES["minimax"]
    written = family.write_config(ours.config)
    assert written["rotary_dim"] == 4 and family.read_config(written) == ours.config
    m2 = transformers.models.minimax_m2.modeling_minimax_m2
    monkeypatch.setattr(transformers.models.minimax.modeling_minimax, "apply_rotary_pos_emb", m2.apply_rotary_pos_emb)
    config = transformers.AutoConfig.for_model("minimax_m2", head_dim=8, max_position_embeddings=64)
    config.rope_parameters = {**values["rope_parameters"], "partial_rotary_factor": 0.5}
    theirs.model.rotary_emb = m2.MiniMaxM2RotaryEmbedding(config)
    expected = theirs(tokens(41)).logits
    assert (ours(tokens(41)).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_types_that_lack_an_element_are_no_families() -> None:
    """... and the error for one of them says which."""
    assert not {kind for kinds in MISSING.values() for kind in kinds.split()} & set(FAMILIES)
    for kind in ("recurrent_gemma", "inkling2_text", "phi4_multimodal"):
        with pytest.raises(CheckpointError, match="its layers need an element that te_models lacks"):
            family_of(kind)


def test_decay_tables_of_another_block_size_come_back(tmp_path: Path) -> None:
    family, options = MIXERS["minimax"]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **options, "block_size": 8})
    source = save(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "hf")
    there_and_back(source, tmp_path)
    assert stored(source)["model.layers.0.self_attn.diagonal_decay"].shape == (1, 4, 8, 8)
    assert_same_bits(stored(source), stored(tmp_path / "back"))


def test_the_original_name_of_mamba_s_embedding(tmp_path: Path) -> None:
    import_hf(save(make("mamba"), tmp_path / "hf"), tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "original", form="original")
    tensors = stored(tmp_path / "original")
    assert "backbone.embedding.weight" in tensors and "backbone.embeddings.weight" not in tensors
    import_hf(tmp_path / "original", tmp_path / "again")
    assert_same_bits(stored(tmp_path / "again"), stored(tmp_path / "ours"))


def test_blocks_repeated_in_every_layer_are_read_once(tmp_path: Path) -> None:
    """As a file whose tied tensors were all saved."""
    source = save(make("zamba2"), tmp_path / "hf")
    tensors = stored(source)
    first, again = "model.layers.1.shared_transformer.", "model.layers.4.shared_transformer."
    copies = {again + name.removeprefix(first): t.clone() for name, t in tensors.items() if name.startswith(first)}
    save_file(tensors | copies, source / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(stored(there_and_back(source, tmp_path)), tensors | copies)
    other = next(iter(copies))
    save_file(tensors | copies | {other: copies[other] + 1}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"layers share weights, but '{re.escape(other)}' differs"):
        import_hf(source, tmp_path / "wrong")


def test_granite_s_names_are_read_too(tmp_path: Path) -> None:
    import_hf(save(make("granitemoe_swa"), tmp_path / "hf"), tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "linear", form="linear")
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in stored(tmp_path / "linear")
    import_hf(tmp_path / "linear", tmp_path / "again")
    assert_same_bits(stored(tmp_path / "again"), stored(tmp_path / "ours"))


def test_a_family_says_which_mixers_it_cannot_express() -> None:
    values = json.loads(make("laguna").config.to_json_string())
    config = FAMILIES["laguna"].read_config(values)
    with pytest.raises(CheckpointError, match=r"'llama' cannot express (attention|moe|mixers)"):
        FAMILIES["llama"].write_config(config)
    heads = config.mixers["heads_6"].replace(window_size=9)
    other = config.replace(mixers={**config.mixers, "heads_6": heads})
    with pytest.raises(CheckpointError, match=r"cannot express mixers.heads_6.window_size = 9"):
        FAMILIES["laguna"].write_config(other)


def test_a_model_type_that_is_not_supported_says_which_element_is_missing() -> None:
    message = "'zamba' is not supported: its layers need an element that te_models lacks, blocks shared"
    with pytest.raises(CheckpointError, match=message):
        family_of("zamba")
    with pytest.raises(CheckpointError, match="'granite9' is not supported; near: granite, granitemoe"):
        family_of("granite9")


def test_inspect_names_the_mixers(tmp_path: Path) -> None:
    found = inspect(save(make("mimo_v2_flash"), tmp_path / "hf"))
    assert found.mixers == {"sliding attention with sinks and scaled values": 2, "full attention with scaled values": 1}
    assert "mixers      2 x sliding attention with sinks and scaled values, 1 x full" in str(found)
