"""Families whose layers have several kinds of mixers: what the tests of all families do not do for each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from te_models import GPTModel, generate
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf, quantize, relayout
from te_models.layers import Float8CurrentScaling, autocast
from tests.checkpoints.families.test_families import save, tokens
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.mixer_cases import MIXERS

FIRST = {family: case for case, (family, _) in reversed(MIXERS.items())}


@pytest.mark.sentinels("laguna-channels", "mimo_v2_flash", "afmoe")
@pytest.mark.parametrize("case", MIXERS)
@torch.no_grad()
def test_text_is_that_of_transformers(case: str) -> None:
    theirs = make(case)
    ours, ids = GPTModel.from_hf(theirs).eval(), tokens(7)
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(ours, ids, 12), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST)
@torch.no_grad()
def test_compiled_decoding_gives_the_same_text(family: str) -> None:
    ours, ids = GPTModel.from_hf(make(FIRST[family])).eval(), tokens(7)
    assert torch.equal(generate(ours, ids, 12, compile=True), generate(ours, ids, 12))


@pytest.mark.sentinels("laguna", "granitemoe_swa")
@pytest.mark.parametrize("family", FIRST)
@torch.no_grad()
def test_bfloat16_is_as_near_as_rounding(family: str) -> None:
    """The choice of experts may tip over: of the best logits' median."""
    expected = make(FIRST[family])(tokens(41)).logits
    got = GPTModel.from_hf(make(FIRST[family]), dtype="bfloat16").eval()(tokens(41)).logits.float()
    assert (got - expected).abs().median() <= 2e-2 * expected.abs().max()


@pytest.mark.sentinels("laguna", "mimo_v2_flash")
@pytest.mark.parametrize("family", FIRST)
def test_quantized_folders_in_both_layouts(tmp_path: Path, family: str) -> None:
    source = save(make(FIRST[family]), tmp_path / "hf")
    import_hf(source, tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "fp8", "current")
    relayout(tmp_path / "fp8", tmp_path / "apart", "per-gemm")
    ids = tokens(9)
    models = [GPTModel.from_pretrained(tmp_path / name).eval() for name in ("fp8", "apart", "plain")]
    fp8, apart, plain = (model(ids).logits for model in models)
    assert torch.equal(fp8, apart)
    assert (fp8 - plain).abs().median() < 0.1 * plain.abs().max()
    relayout(tmp_path / "apart", tmp_path / "together", "grouped")
    assert_same_bits(stored(tmp_path / "fp8"), stored(tmp_path / "together"))


@pytest.mark.sentinels("mimo_v2_flash")
@pytest.mark.parametrize("family", FIRST)
def test_forward_and_backward_pass_in_one_graph(fresh_compiler: None, family: str) -> None:
    model = GPTModel.from_hf(make(FIRST[family])).train()
    ids, found = tokens(16), []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with autocast(recipe=Float8CurrentScaling()):
            loss = run(ids, labels=ids, return_logits=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("laguna", {"gating": False}, "gating = False; supported: True, 'per-head', 'per-element'"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "1 num_attention_heads_per_layer and 3 layers"),
        ("granite_swa", {"layer_rope_theta": [-1.0, 1.0, 1.0, 1.0]}, "layer_rope_theta = .*; allowed: 0 or more"),
        ("granite_swa", {"layer_rope_theta": [1.0, None, 1.0, 1.0]}, "layer_rope_theta = None"),
        ("llama", {"gating": True}, "gating = True, which changes the model"),
        ("llama", {"attention_value_scale": 0.5}, "attention_value_scale = 0.5, which changes the model"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(family: str, changes: dict, message: str) -> None:
    values = json.loads(make(FIRST.get(family, "granite_swa")).config.to_json_string()) | changes
    with pytest.raises(CheckpointError, match=message):
        FAMILIES[family].read_config(values)


def test_the_published_spelling_of_mimo() -> None:
    """Its config.json has other fields than transformers': a 1 for a window, and for experts."""
    family = FAMILIES["mimo_v2_flash"]
    values = json.loads(make("mimo_v2_flash").config.to_json_string())
    config = family.read_config(values)
    spelled = {"hybrid_layer_pattern": [1, 0, 1], "moe_layer_freq": [0, 1, 1], "sliding_window_size": 4}
    spelled |= {"layernorm_epsilon": values.pop("rms_norm_eps")}
    for name in ("layer_types", "mlp_layer_types", "sliding_window"):
        values.pop(name)
    assert family.read_config(values | spelled) == config


def test_granite_s_names_are_read_too(tmp_path: Path) -> None:
    source = save(make("granitemoe_swa"), tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "linear", form="linear")
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in stored(tmp_path / "linear")
    import_hf(tmp_path / "linear", tmp_path / "again")
    assert_same_bits(stored(tmp_path / "again"), stored(tmp_path / "ours"))
