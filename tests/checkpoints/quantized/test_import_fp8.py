"""FP8 in 128x128 blocks: taken over number for number, dequantized, or refused in one sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, dequantize, export_hf, import_hf, inspect, open_checkpoint, verify
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.quantized_cases import CASES, FP8_CONFIG, Case, fp8_block, make

POW2 = FP8_CONFIG | {"scale_fmt": "ue8m0"}
MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")


@pytest.mark.sentinels("deepseek_v3-per-gemm", "qwen3_moe-grouped")
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("model", MODELS)
def test_the_numbers_of_the_files_are_taken_over(tmp_path: Path, model: str, layout: str) -> None:
    source, reference = make(Case(model, fp8_block(), FP8_CONFIG), tmp_path)
    plan = import_hf(source, tmp_path / "ours", layout=layout)
    assert all(line.kind == "exact" for line in plan.report.lines.values())
    assert sorted(p for o in plan.outputs for p in {piece.source for piece in o.pieces}) == sorted(stored(source))
    ours, theirs = stored(tmp_path / "ours"), stored(source)
    p, q = "decoder.layers.1.", "model.layers.1."
    for suffix in ("", "_scale_inv"):
        down = f"{q}mlp.experts.1.down_proj.weight" if model != "qwen3" else f"{q}mlp.down_proj.weight"
        name = f"{p}mlp.linear_fc2.weight" if model == "qwen3" else f"{p}mlp.experts.linear_fc2.weight"
        found = ours[f"{name}{suffix}"] if layout == "grouped" or model == "qwen3" else ours[f"{name}1{suffix}"]
        found = found[1] if found.dim() == 3 else found
        assert torch.equal(found.view(torch.uint8), theirs[down + suffix].view(torch.uint8))
    assert verify(source, tmp_path / "ours").equal
    dequantize(tmp_path / "ours", tmp_path / "values")
    report = verify(tmp_path / "values", reference)
    assert report.equal, str(report)


@pytest.mark.parametrize("model", MODELS)
def test_dequantized_on_import_they_are_the_reference_s_values(tmp_path: Path, model: str) -> None:
    source, reference = make(Case(model, fp8_block(), FP8_CONFIG), tmp_path, torch.float32)
    plan = import_hf(source, tmp_path / "values", dequantize=True)
    assert {line.kind for line in plan.report.lines.values()} == {"exact", "dequantized"}
    report = verify(tmp_path / "values", reference)
    assert report.equal, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe-ragged"])
def test_power_of_two_scales_also_fit_mxfp8(tmp_path: Path, model: str) -> None:
    source, reference = make(Case(model, fp8_block(pow2=True), POW2), tmp_path)
    plan = import_hf(source, tmp_path / "ours", storage="mxfp8")
    assert {line.kind for line in plan.report.lines.values()} == {"exact", "re-encoded exact"}
    assert inspect(tmp_path / "ours").formats == {"mxfp8": 8}
    dequantize(tmp_path / "ours", tmp_path / "values")
    assert verify(tmp_path / "values", reference).equal


def test_bfloat16_scales_become_float32(tmp_path: Path) -> None:
    source, reference = make(Case("qwen3", fp8_block(torch.bfloat16), FP8_CONFIG), tmp_path)
    plan = import_hf(source, tmp_path / "ours")
    assert plan.report is not None and "fp8 -> float8_block: re-encoded exact" in str(plan.report)
    dequantize(tmp_path / "ours", tmp_path / "values")
    assert verify(tmp_path / "values", reference).equal


@pytest.mark.parametrize("storage", ["float8_block", "mxfp8"])
def test_scales_that_are_bytes_are_taken_over_and_come_back(tmp_path: Path, storage: str) -> None:
    """As transformers writes them where the declaration says ue8m0."""
    source, reference = make(CASES["fp8-ue8m0"], tmp_path)
    tensors = stored(source)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu)
    tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"].view(torch.uint8)[0] = 0  # 2^-127, a subnormal number
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = import_hf(source, tmp_path / "ours", storage=storage)
    assert {line.kind for line in plan.report.lines.values()} == {"exact", "re-encoded exact"}
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), tensors)
    dequantize(tmp_path / "ours", tmp_path / "values")
    import_hf(reference, tmp_path / "reference-ours")
    values, expected = stored(tmp_path / "values"), stored(tmp_path / "reference-ours")
    changed = {n for n in expected if not torch.equal(values[n], expected[n])}
    assert changed == {"decoder.layers.0.self_attention.linear_proj.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
def test_scales_that_do_not_keep_their_promise_are_taken_over(tmp_path: Path, layout: str) -> None:
    """As in DeepSeek-V3.1-Terminus: the declaration says ue8m0, and some scales are no powers of two."""
    source, _ = make(CASES["fp8-ue8m0"], tmp_path)
    tensors = stored(source)
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts.1.up_proj"):
        tensors[f"{name}.weight_scale_inv"] *= 1.3
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = import_hf(source, tmp_path / "ours", layout=layout)
    assert {line.kind for line in plan.report.lines.values()} == {"exact"}
    with open_checkpoint(tmp_path / "ours") as ckpt:
        kept = {name: meta["quantizer"]["force_pow_2_scales"] for name, meta in ckpt.formats.items()}
    loose = {"decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.1.mlp.experts.linear_fc1.weight"}
    assert {name for name, pow2 in kept.items() if not pow2} == loose and len(kept) == 8
    assert verify(source, tmp_path / "ours").equal
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())
    import_hf(source, tmp_path / "expected", dequantize=True)
    dequantize(tmp_path / "ours", tmp_path / "values")
    assert verify(tmp_path / "values", tmp_path / "expected").equal
    with pytest.raises(CheckpointError, match=r"o_proj.weight_scale_inv' .* as storage in mxfp8 needs"):
        import_hf(source, tmp_path / "x", storage="mxfp8")


def test_cut_blocks_are_refused_or_requantized_as_asked(tmp_path: Path) -> None:
    source, reference = make(Case("qwen3_moe-ragged", fp8_block(), FP8_CONFIG), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"fills rows 0 to 96 .* cuts blocks of 128 .* --allow-requantize"
    ) as caught:
        import_hf(source, tmp_path / "new" / "ours")
    assert "--dequantize" in str(caught.value) and not (tmp_path / "new").exists()
    with open_checkpoint(source) as ckpt:
        assert "decoder.layers.0.mlp.experts.linear_fc2.weight" in ckpt.formats
        assert "decoder.layers.0.mlp.experts.linear_fc1.weight" not in ckpt.formats
    plan = import_hf(source, tmp_path / "ours", allow_requantize=True)
    (line,) = (line for line in plan.report.lines.values() if line.kind == "requantized")
    assert (line.tensors, line.count) == ("mlp.experts.linear_fc1.weight", 2)
    dequantize(tmp_path / "ours", tmp_path / "values")
    import_hf(reference, tmp_path / "reference-ours")
    worst = {}
    for folder, exact in (("values", False), ("reference-ours", True)):
        worst[exact] = stored(tmp_path / folder)
    for name, value in worst[True].items():
        error = float((value.float() - worst[False][name].float()).abs().max())
        assert line.max_error is not None
        assert error <= (1.01 * line.max_error + 1e-3 if "experts.linear_fc1" in name else 0.0), name
    written = json.loads((tmp_path / "ours/conversion.json").read_text())
    assert written["classes"] == plan.to_dict()["classes"] == plan.report.to_dict()
    import_hf(source, tmp_path / "values-too", dequantize=True)
    assert verify(tmp_path / "values-too", reference).equal


@pytest.mark.sentinels("fp8-model.layers.0.self_attn.q_proj", "compressed-tensors-lm_head")
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "lm_head"])
@pytest.mark.parametrize("scheme", ["fp8", "compressed-tensors"])
def test_an_export_declares_the_weights_that_are_quantized(tmp_path: Path, name: str, scheme: str) -> None:
    """Part of a joined weight that was not is, where that is quantized anew; the output layer that was is values."""
    known = CASES["fp8-dense" if scheme == "fp8" else "float-quantized-tensor"]
    assert known.config is not None
    listed = "modules_to_not_convert" if scheme == "fp8" else "ignore"

    def chosen(weight: str) -> bool:
        return known.chosen(weight) != (weight == f"{name}.weight")

    plain = [name, "lm_head"] if name != "lm_head" else []
    source, _ = make(replace(known, chosen=chosen, config=known.config | {listed: plain}), tmp_path)
    plan = import_hf(source, tmp_path / "ours", allow_requantize=True)
    assert plan.report is not None
    plan = export_hf(tmp_path / "ours", tmp_path / "back")
    tensors = stored(tmp_path / "back")
    assert (tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn) == (name != "lm_head")
    config = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == scheme and config[listed] == ["lm_head"]
    scales = {n for n in stored(source) if "input_scale" in n}  # kept where all that is quantized has one
    gone = {n for n in scales if n.startswith("lm_head")} if name == "lm_head" else scales
    assert {n for n in plan.ignored if n.endswith("input_scale")} == gone
    assert {n for n in tensors if n.endswith("input_scale")} == scales - gone
    import_hf(tmp_path / "back", tmp_path / "again")
    again, ours = stored(tmp_path / "again"), stored(tmp_path / "ours")
    assert_same_bits(again, {n: t for n, t in ours.items() if n in again})


def test_a_saved_model_declares_the_weights_that_are_quantized(tmp_path: Path) -> None:
    """Fewer than in the folder that it came from."""
    source, _ = make(CASES["fp8-dense"], tmp_path)
    import_hf(source, tmp_path / "ours")
    model = GPTModel.from_pretrained(tmp_path / "ours", device="cpu")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    layer = model.get_submodule(name.removesuffix(".weight"))
    layer.weight = torch.nn.Parameter(layer.weight.detach().dequantize())
    model.save_pretrained(tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "back")
    config = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["model.layers.1.mlp.down_proj", "lm_head"]
    assert stored(tmp_path / "back")["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
