"""glm5_next: what the tests of all models beside ones that see images do not do for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, generate
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf, quantize
from tests.checkpoints.families.test_text_part import CASES, GLM, SIZES, fill, make, save, without_warnings
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back, transformers

FAMILY = FAMILIES["glm5_next"]
FLAGS: dict[str, dict[str, Any]] = {
    "layers": {
        "layer_types": None,
        "indexer_types": None,
        "mlp_layer_types": None,
        "linear_conv_kernel_dim": 3,
        "linear_lower_bound": None,
        "attention_bias": True,
        "norm_topk_prob": False,
    },
    "numbers": {
        "linear_lower_bound": -2.0,
        "hc_eps": 1e-2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "rms_norm_eps": 0.07,
        "swiglu_limit": 0.2,
        "routed_scaling_factor": 1.3,
        "n_group": 2,
        "topk_group": 1,
        "index_kpool": 1,
        "index_topk": 5,
    },
}


def with_flags(changes: dict[str, Any]) -> transformers.PreTrainedModel:
    text = {**SIZES, **GLM, **changes, "model_type": "glm5_next_text"}
    config = transformers.AutoConfig.for_model("glm5_next", text_config=text, **CASES["glm5_next"][2])
    with torch.random.fork_rng(), without_warnings():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        fill(model)
    return model


def ids_of(length: int) -> torch.Tensor:
    """Of a row all are different: without positions, equal ones have equal scores, and transformers chooses any."""
    generator = torch.Generator().manual_seed(length)
    return torch.stack([torch.randperm(58, generator=generator)[:length] + 3 for _ in range(2)])


@pytest.mark.parametrize("name", FLAGS)
@torch.no_grad()
def test_every_flag_is_followed(tmp_path: Path, name: str) -> None:
    theirs = with_flags(FLAGS[name])
    source = save(theirs, tmp_path / "hf")
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))
    values = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == values
    config = FAMILY.read_config(values)
    written = json.loads(json.dumps(FAMILY.write_config(config)))
    assert FAMILY.read_config(written) == config
    again = transformers.AutoConfig.for_model("glm5_next", **written).text_config.to_dict()
    before = theirs.config.text_config.to_dict()
    known = FAMILY.fields[0].known
    assert {n: again[n] for n in known if n in before} == {n: before[n] for n in known if n in before}
    ours = GPTModel.from_pretrained(tmp_path / "ours").eval()
    for length in (1, 5, 41):
        got, expected = ours(ids_of(length)).logits, theirs(input_ids=ids_of(length)).logits
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    mask = torch.ones(2, 23, dtype=torch.int64)
    mask[0, :5] = 0
    got, expected = (m(input_ids=ids_of(23), attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_text_is_that_of_transformers() -> None:
    theirs = make("glm5_next")
    ours, ids = GPTModel.from_hf(theirs).eval(), ids_of(15)
    expected = theirs.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(ours, ids, 10), expected)
    got = GPTModel.from_hf(theirs, dtype="bfloat16").eval()(ids).logits.float()
    logits = theirs(input_ids=ids).logits
    assert (got - logits).abs().median() <= 2e-2 * logits.abs().max()


@torch.no_grad()
def test_forms_layouts_and_quantized_folders(tmp_path: Path) -> None:
    theirs = make("glm5_next")
    source = save(theirs, tmp_path / "hf")
    names = stored(source)
    at = "model.language_model.layers."
    assert {f"{at}0.hc_attn_fn", f"{at}0.hc_ffn_base", f"{at}2.self_attn.q_conv1d.weight"} <= names.keys()
    with without_warnings():
        theirs.save_pretrained(tmp_path / "memory", save_original_format=False)
    assert f"{at}0.attn_hc.fn" in stored(tmp_path / "memory")
    for name, layout in (("hf", "grouped"), ("memory", "per-gemm")):
        import_hf(tmp_path / name, tmp_path / f"{name}-ours", layout=layout)
        export_hf(tmp_path / f"{name}-ours", tmp_path / f"{name}-back")
        assert_same_bits(stored(tmp_path / name), stored(tmp_path / f"{name}-back"))
    export_hf(tmp_path / "memory-ours", tmp_path / "published", form="published")
    assert_same_bits(names, stored(tmp_path / "published"))
    quantize(tmp_path / "hf-ours", tmp_path / "fp8", "current")
    plain, fp8 = (GPTModel.from_pretrained(tmp_path / name).eval()(ids_of(20)).logits for name in ("hf-ours", "fp8"))
    assert (fp8 - plain).abs().median() < 0.1 * plain.abs().max()


def test_other_spellings() -> None:
    values = json.loads(make("glm5_next").config.to_json_string())
    config, text = FAMILY.read_config(values), values["text_config"]
    flat = {k: v for k, v in values.items() if k != "text_config"} | {k: v for k, v in text.items() if k not in values}
    assert FAMILY.read_config(flat) == config
    inner = {"head_dim": 7, "num_heads": 3, "short_conv_kernel_size": 4, "gate_lower_bound": None, "safe_gate": True}
    outer = {k: v for k, v in text.items() if not k.startswith("linear_")} | {"linear_attn_config": inner}
    outer["layer_types"] = [kind.replace("indexed", "full") for kind in text["layer_types"]]
    assert FAMILY.read_config(values | {"text_config": outer}) == config
    outer["linear_attn_config"] = inner | {"safe_gate": False}
    mixers = FAMILY.read_config(values | {"text_config": outer}).mixers
    assert mixers["gated_delta"].decay_lower_bound is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False; supported: True"),
        ({"index_kpool": 5}, "indexer.pool_size is 5; allowed: a divisor of topk = 12"),
        ({"indexer_types": ["full", "full", "full", "shared", "full"]}, "'shared' one in indexer_types behind a layer"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: silu"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types = .*allowed for each: 'indexed_attention', "),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    values = json.loads(make("glm5_next").config.to_json_string())
    with pytest.raises(CheckpointError, match=message):
        FAMILY.read_config(values | {"text_config": values["text_config"] | changes})
