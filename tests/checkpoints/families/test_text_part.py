"""Published folders of models that also see images: the text model within, there and back, with the rest carried."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, AutoConverter, CheckpointError, export_hf, import_hf, open_checkpoint, toy
from te_models.checkpoints.families.base.text_part import TEXT, text_part
from tests.checkpoints.family_cases import CASES as TEXTS
from tests.checkpoints.family_cases import SIZES, fill
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back, transformers
from tests.checkpoints.integer_cases import group_of, packed
from tests.checkpoints.quantized_cases import compressed

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 8}
SIGHT = {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
QWEN: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
MARKS = {"image_token_id": 2, "video_token_id": 2, "vision_start_token_id": 2, "vision_end_token_id": 2}
QWEN3_SIGHT = QWEN | {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
QWEN2_SIGHT = QWEN | {"out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 8}
GLM_SIGHT = QWEN | {"out_hidden_size": 32, "image_size": 16, "projection_intermediate_size": 20}
GLM_MARKS = {f"{kind}{place}_token_id": 2 for kind in ("image", "video") for place in ("", "_start", "_end")}
GLM: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 0,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "layer_types": [f"{kind}_attention" for kind in ("indexed", "indexed", "linear", "indexed", "linear")],
    "indexer_types": ["full", "shared", "full", "full", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "linear_head_dim": 7,
    "linear_num_heads": 3,
    "index_n_heads": 24,  # so many that hardly a score is zero: of equal scores transformers chooses any
    "index_head_dim": 9,
    "index_topk": 12,
    "index_kpool": 4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "swiglu_limit": 0.5,
}
KIMI = {k: v for k, v in VISION.items() if k != "image_size"} | {"pos_emb_height": 4, "pos_emb_width": 4}
GEMMA4_SIGHT = VISION | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16}
HEARING = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
}
MROPE = {"rope_type": "default", "rope_theta": 3e4, "mrope_section": [1, 2, 1]}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "llama4": ("llama4", "llama4", {"vision_config": VISION | SIGHT}),
    "mistral3-of-ministral3": ("mistral3", "ministral3", {"vision_config": PIXTRAL, "tie_word_embeddings": False}),
    "mistral3-of-mistral4": ("mistral3", "mistral4", {"vision_config": PIXTRAL, "tie_word_embeddings": False}),
    "mistral3-of-mistral": ("mistral3", "mistral", {"vision_config": PIXTRAL}),
    "kimi_k25": ("kimi_k25", "deepseek_v3", {"vision_config": KIMI, "tie_word_embeddings": False, **MARKS}),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_text", {"vision_config": QWEN3_SIGHT, **MARKS}),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe_text", {"vision_config": QWEN3_SIGHT, **MARKS}),
    "gemma4": ("gemma4", "gemma4", {"vision_config": GEMMA4_SIGHT, "audio_config": HEARING, **MARKS}),
    "gemma4-wide": ("gemma4", "gemma4-wide", {"vision_config": GEMMA4_SIGHT, **MARKS}),
    "qwen3_5": ("qwen3_5", "qwen3_5_text", {"vision_config": QWEN3_SIGHT, **MARKS}),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text", {"vision_config": QWEN3_SIGHT, **MARKS}),
    "glm5_next": ("glm5_next", "glm5_next_text", {"vision_config": GLM_SIGHT, **GLM_MARKS}),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl_text", {"vision_config": QWEN2_SIGHT, **MARKS}),
}
"""Name -> the family, its text model (a case of `family_cases`, or another), and what stands beside `text_config`."""
OPTIONS = {
    "qwen3_vl_moe_text": {
        "head_dim": 8,
        "rope_parameters": MROPE,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
    "glm5_next_text": GLM,
    "qwen3_vl_text": {"head_dim": 8, "rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
}
SEEING = ("visual.", "vision_tower.", "vision_model.", "mm_projector.", "multi_modal_projector.")
SEEING += ("audio_tower.", "embed_vision.", "embed_audio.")


@contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def make(case: str) -> transformers.PreTrainedModel:
    family, text, outside = CASES[case]
    kind, options = TEXTS.get(text, (text, OPTIONS.get(text, {"head_dim": 16, "sliding_window": None})))
    config = transformers.AutoConfig.for_model(
        family, text_config={**SIZES, **options, "model_type": kind}, image_token_index=2, **outside
    )
    with torch.random.fork_rng(), without_warnings():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        fill(model)
    return model


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    with without_warnings():
        model.save_pretrained(folder)
    return folder


def rewrite(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change config.json; None takes a field away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def assert_same_logits(folder: Path, theirs: transformers.PreTrainedModel) -> None:
    tokens = torch.randint(3, 61, (2, 41), generator=torch.Generator().manual_seed(0))
    expected, got = theirs(input_ids=tokens).logits, GPTModel.from_pretrained(folder).eval()(tokens).logits
    assert expected.std() > 0.02 and (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.sentinels("llama4", "mistral3-of-ministral3")
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_config_and_logits(tmp_path: Path, case: str) -> None:
    """The tensors of the part that sees travel along, whatever their dtype, and every bit comes back."""
    theirs = make(case)
    source = save(theirs, tmp_path / "hf")
    tensors = stored(source)
    seeing = {name for name in tensors if any(part in name for part in SEEING)}
    assert len(seeing) > 10
    tensors |= {name: tensors[name].half() for name in sorted(seeing)[:1]}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = import_hf(source, tmp_path / "ours")
    assert set(plan.passthrough) == {f"carried.{name}" for name in seeing} and not plan.ignored
    plan = export_hf(tmp_path / "ours", tmp_path / "back")
    assert set(plan.passthrough) == seeing and not plan.ignored
    assert_same_bits(tensors, stored(tmp_path / "back"))
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    assert_same_logits(tmp_path / "ours", theirs)
    assert_same_logits(source, theirs)
    family = FAMILIES[CASES[case][0]]
    model = family.read_config(config)
    assert family.read_config(json.loads(json.dumps(family.write_config(model)))) == model


@pytest.mark.sentinels("gemma3", "mistral3-of-mistral")
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_in_memory(tmp_path: Path, case: str) -> None:
    """A state dict has other names than files; the text model alone goes back to its own class."""
    theirs = make(case)
    ours = GPTModel.from_hf(theirs)
    import_hf(save(theirs, tmp_path / "hf"), tmp_path / "ours")
    assert_same_bits(dict(GPTModel.from_pretrained(tmp_path / "ours").state_dict()), dict(ours.state_dict()))
    if case == "glm5_next":
        with pytest.raises(CheckpointError, match="this transformers has no class for the family 'glm5_next_text'"):
            ours.to_hf()
        return
    with without_warnings():
        alone = ours.to_hf()
    part = text_part(FAMILIES[CASES[case][0]])
    assert alone.config.model_type == part.family_of(ours.config).model_type
    alone.set_attn_implementation("eager")
    tokens = torch.arange(3, 40)[None]
    assert torch.equal(alone(tokens).logits, theirs(input_ids=tokens).logits)


@torch.no_grad()
def test_as_its_text_family_and_back(tmp_path: Path) -> None:
    """The text model is exported alone on request; it says that the rest is left out, and cannot get it back."""
    theirs = make("gemma3")
    import_hf(save(theirs, tmp_path / "hf"), tmp_path / "ours")
    plan = export_hf(tmp_path / "ours", tmp_path / "text", family="gemma3_text")
    assert plan.ignored and not any("language_model" in name for name in stored(tmp_path / "text"))
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    tokens = torch.arange(3, 40)[None]
    assert torch.equal(alone(tokens).logits, theirs(input_ids=tokens).logits)
    import_hf(tmp_path / "text", tmp_path / "text-ours")
    with pytest.raises(CheckpointError, match="'gemma3' also see images, which this one does not; see 'gemma3_text'"):
        export_hf(tmp_path / "text-ours", tmp_path / "no", family="gemma3")
    export_hf(tmp_path / "text-ours", tmp_path / "again")
    assert_same_bits(stored(tmp_path / "text"), stored(tmp_path / "again"))


def test_a_changed_model_keeps_the_rest_of_both_configurations(tmp_path: Path) -> None:
    source = save(make("mistral3-of-mistral"), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["torch_dtype"] = "float32"
    rewrite(source, text_config=config["text_config"])
    converter = AutoConverter.from_pretrained(source)
    changed = converter.config.replace(norm=converter.config.norm.replace(layernorm_epsilon=0.5))
    written = AutoConverter(changed, converter.family, converter.source).hf_config({"x": torch.zeros(1)})
    assert written["text_config"] == {**config["text_config"], "rms_norm_eps": 0.5, **written["text_config"]}
    assert written["text_config"]["rms_norm_eps"] == 0.5 and written["text_config"]["torch_dtype"] == "float32"
    assert {k: v for k, v in written.items() if k != "text_config"} == {
        k: v for k, v in config.items() if k != "text_config"
    }


def test_what_published_files_leave_out() -> None:
    """gemma-3-4b-it has only the sizes that differ from the class's; absent flags have the text class's values."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    sizes |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = FAMILIES["gemma3"].read_config({"model_type": "gemma3", "text_config": sizes})
    spelled_out = transformers.Gemma3Config(text_config=sizes).text_config.to_dict()
    assert config == FAMILIES["gemma3_text"].read_config(spelled_out)
    assert (config.vocab_size, config.attention.num_attention_heads) == (262208, 8)
    assert config.embedding.share_embeddings_and_output_weights


def test_every_such_family_has_a_case() -> None:
    """gemma3n's class needs a library of vision models: its files are those of its text model in test_gemma.py."""
    images = {name for name, family in FAMILIES.items() if text_part(family) is not None} - {"gemma3n"}
    assert images == {family for family, _, _ in CASES.values()}


@pytest.mark.parametrize(
    ("family", "kind", "within", "outside", "tied"),
    [
        ("gemma3", "gemma3_text", None, None, True),
        ("gemma3", "gemma3_text", True, False, False),
        ("mistral3", "ministral3", None, None, False),
        ("mistral3", "ministral3", True, None, True),
        ("mistral3", "mistral", False, True, True),
        ("llama4", "llama4_text", False, True, False),
        ("llama4", "llama4_text", True, False, True),
    ],
)
def test_which_flag_ties(family: str, kind: str, within: bool | None, outside: bool | None, tied: bool) -> None:
    text: dict[str, Any] = {**SIZES, "head_dim": 8, "model_type": kind}
    text |= {} if within is None else {"tie_word_embeddings": within}
    values = {"text_config": text} | ({} if outside is None else {"tie_word_embeddings": outside})
    assert FAMILIES[family].read_config(values).embedding.share_embeddings_and_output_weights is tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "config.json has text_config = None, which is not an object"),
        ({"text_config": [1]}, r"config.json has text_config = \[1\], which is not an object"),
        ({"text_config": {"model_type": "qwen2"}}, "a text_config of 'qwen2'; supported: gemma3_text"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers|layers"),
        ({"tie_word_embeddings": 3}, "tie_word_embeddings = 3, which is not true or false"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = save(make("gemma3"), tmp_path / "hf")
    rewrite(source, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


def test_a_tensor_of_neither_part_is_refused(tmp_path: Path) -> None:
    source = save(make("gemma3"), tmp_path / "hf")
    extra = {"audio_tower.weight": torch.ones(1)}
    save_file(stored(source) | extra, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not part of this model: 'audio_tower\.weight'"):
        import_hf(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@torch.no_grad()
def test_a_toy_keeps_the_part_that_sees(tmp_path: Path) -> None:
    source = save(make("llama4"), tmp_path / "hf")
    plan = toy(source, tmp_path / "toy", layers=1, experts=2)
    originals, parts = stored(source), stored(tmp_path / "toy")
    seeing = {name for name in originals if any(part in name for part in SEEING)}
    assert set(plan.passthrough) == seeing and not plan.ignored
    assert all(torch.equal(parts[name], originals[name]) for name in seeing)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "toy", attn_implementation="eager")
    assert_same_logits(tmp_path / "toy", theirs.eval())


@torch.no_grad()
def test_qwen2_5_vl_with_all_fields_side_by_side(tmp_path: Path) -> None:
    """As it is published: no text_config, and the older names of the rotation."""
    theirs = make("qwen2_5_vl")
    source = save(theirs, tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"rope_theta": MROPE["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}
    config = {k: v for k, v in text.items() if k not in ("model_type", "rope_parameters")} | rope | config
    (source / "config.json").write_text(json.dumps(config))
    there_and_back(source, tmp_path)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    assert_same_logits(tmp_path / "ours", theirs)
    converter = AutoConverter.from_pretrained(source)
    changed = converter.config.replace(norm=converter.config.norm.replace(layernorm_epsilon=0.5))
    written = AutoConverter(changed, converter.family, converter.source).hf_config({"x": torch.zeros(1)})
    assert "text_config" not in written and written["rms_norm_eps"] == 0.5 and written["model_type"] == "qwen2_5_vl"
    assert written["rope_parameters"]["mrope_section"] == [1, 2, 1] and "rope_scaling" not in written
    assert FAMILIES["qwen2_5_vl"].read_config(written) == changed


@torch.no_grad()
def test_the_text_model_alone_says_that_it_is_quantized(tmp_path: Path) -> None:
    """As Kimi-K2.5: experts of four bits, with `quantization_config` inside `text_config`."""
    source = save(make("kimi_k25"), tmp_path / "hf")
    generator, files, plain = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in stored(source).items():
        published = name.replace(f"{TEXT}model.blocks", f"{TEXT}model.layers")
        files[published] = plain[published] = tensor
        if ".experts." in name:
            parts, values = packed(4, None)(published, tensor, generator)
            plain[published] = values.to(tensor.dtype)
            files = {k: v for k, v in files.items() if k != published} | parts
    said = compressed("pack-quantized") | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}
    said["config_groups"]["group_0"]["weights"] = group_of(4, None)
    config = rewrite(source)
    for folder, tensors, text in (("int4", files, {"quantization_config": said}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        values = config | {"text_config": config["text_config"] | text}
        (tmp_path / folder / "config.json").write_text(json.dumps(values))
    assert_same_bits(stored(there_and_back(tmp_path / "int4", tmp_path)), files)
    assert rewrite(tmp_path / "back") == rewrite(tmp_path / "int4")
    ids = torch.arange(3, 20)[None]
    models = [GPTModel.from_pretrained(tmp_path / name).eval() for name in ("ours", "plain")]
    got, expected = (model(ids).logits for model in models)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    export_hf(tmp_path / "ours", tmp_path / "values", dequantize=True)
    assert "quantization_config" not in rewrite(tmp_path / "values")["text_config"]
    assert_same_bits(stored(tmp_path / "values"), plain)
