"""diff: what differs, and by how much."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import GPTModel
from te_models.checkpoints import VerifyReport, diff, export_hf, import_hf, quantize, relayout, verify
from te_models.checkpoints.mapping.parameters import StoredParameters
from te_models.checkpoints.quantized import row_blocks as bands
from te_models.checkpoints.tools import diff as difference
from te_models.cli.main import main
from tests.build import tiny_moe
from tests.checkpoints.hf_cases import HFFolder
from tests.checkpoints.quantized_cases import CASES, make

NAME = "decoder.layers.0.mlp.linear_fc2.weight"


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """Replace (None: remove) a tensor of a folder; return the old one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    old = tensors.pop(name, torch.empty(0))
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file, metadata={"format": "pt"})
    return old


def test_the_same_model_in_other_layouts_and_kinds(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("qwen3_moe")
    import_hf(source, tmp_path / "ours")
    relayout(tmp_path / "ours", tmp_path / "per-gemm", "per-gemm")
    for a, b in ((source, tmp_path / "ours"), (tmp_path / "per-gemm", tmp_path / "ours")):
        report = diff(a, b)
        assert report.equal and report.equal_tensors > 10 and not report.tensors


def test_differences_are_measured(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("llama", dtype=torch.float32)
    import_hf(source, tmp_path / "ours")
    theirs = "model.layers.0.mlp.down_proj.weight"
    old = change(source, theirs, None)
    new = old.clone()
    new[3, 5] += 0.25
    new[7, 1] -= 1.5
    change(source, theirs, new)
    (found,) = diff(source, tmp_path / "ours").tensors
    assert (found.name, found.differing, found.elements) == (NAME, 2, old.numel())
    assert found.largest == pytest.approx(1.5, rel=1e-5)
    assert found.relative == pytest.approx(((new - old).norm() / new.norm()).item(), rel=1e-5)
    new[0, 0] = math.nan
    change(source, theirs, new)
    (found,) = diff(source, tmp_path / "ours").tensors
    assert found.differing == 3 and math.isnan(found.largest) and math.isnan(found.relative)
    assert diff(source, source).equal, "NaN equals itself"
    json.dumps(diff(source, tmp_path / "ours").to_dict(), allow_nan=False)


def test_the_largest_difference_comes_first(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "ours")
    quantize(llama, tmp_path / "fp8", "current")
    report = diff(tmp_path / "ours", tmp_path / "fp8")
    relative = [t.relative for t in report.tensors]
    assert relative == sorted(relative, reverse=True) and 0 < relative[-1] <= relative[0] < 0.05
    assert len(report.tensors) == 8 and f"{NAME}: bfloat16 and float8" in report.notes


def test_configuration_and_tensors_of_one_side(hf_folder: HFFolder, tmp_path: Path) -> None:
    tied, plain = hf_folder("qwen2-tied"), hf_folder("qwen3")
    report = diff(tied, plain)
    assert report.config["embedding.share_embeddings_and_output_weights"] == (True, False)
    assert f"output_layer.weight: only in {plain}" in report.notes
    assert any(": [64, 32] and [128, 32]" in note or "linear_qkv.weight: [" in note for note in report.notes)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(tied, buffer, torch.ones(3))
    import_hf(tied, tmp_path / "ours")
    assert diff(tied, tmp_path / "ours").equal
    change(tmp_path / "ours", f"carried.{buffer}", torch.tensor([1.0, 2.0, 1.0]))
    assert diff(tied, tmp_path / "ours").notes == [f"carried.{buffer}[1]: 1.0 and 2.0"]
    change(tmp_path / "ours", f"carried.{buffer}", None)
    assert diff(tied, tmp_path / "ours").notes == [f"carried.{buffer}: only in {tied}"]


def test_what_config_json_has_no_word_for_is_no_difference(tmp_path: Path) -> None:
    config = tiny_moe(moe_ffn_hidden_size=48, aux_loss_coeff=0.01, z_loss_coeff=0.001)
    GPTModel(config).save_pretrained(tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "hf")
    assert verify(tmp_path / "ours", tmp_path / "hf").equal and diff(tmp_path / "hf", tmp_path / "ours").equal
    file = tmp_path / "hf/config.json"
    theirs = {"router_aux_loss_coef": 0.02, "output_router_logits": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | theirs))
    assert verify(tmp_path / "ours", tmp_path / "hf").differences == [
        "config: moe.moe_router_load_balancing_type: 'aux_loss' and 'joint_aux_loss'",
        "config: moe.aux_loss_coeff: 0.01 and 0.02",
    ]


@pytest.mark.parametrize(("recipe", "stored"), [("nvfp4", "weight_packed"), ("mxfp8", "weight")])
def test_a_folder_for_training_is_its_export(recipe: str, stored: str, llama: Path, tmp_path: Path) -> None:
    """Its transposes are in no Hugging Face file, and how it rounds is not said there."""
    quantize(llama, tmp_path / "stored", recipe)
    export_hf(tmp_path / "stored", tmp_path / "hf")
    assert verify(tmp_path / "stored", tmp_path / "hf").equal and verify(tmp_path / "hf", tmp_path / "stored").equal
    name = f"model.layers.0.self_attn.o_proj.{stored}"
    old = change(tmp_path / "hf", name, None)
    change(tmp_path / "hf", name, old.flip(0))
    (found,) = verify(tmp_path / "stored", tmp_path / "hf").differences
    assert found.startswith("decoder.layers.0.self_attention.linear_proj.weight")


def test_the_verb(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize(llama, tmp_path / "fp8", "mxfp8")
    assert main(["diff", str(llama), str(llama)]) == 0
    assert capsys.readouterr().out == "15 parameters equal, 0 different\n"
    assert main(["diff", str(llama), str(tmp_path / "fp8"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] is False and result["equal_tensors"] == 7 and len(result["tensors"]) == 8
    assert main(["diff", str(llama), str(tmp_path / "fp8")]) == 1
    out = capsys.readouterr().out
    assert "parameter" in out and NAME in out and out.endswith("7 parameters equal, 8 different\n")
    assert main(["diff", str(llama), str(tmp_path / "absent")]) == 2


def test_scales_that_no_form_of_ours_takes_over_are_seen(tmp_path: Path) -> None:
    """Gate and up of 96 rows cut blocks of 128, so they are compared as values, which bfloat16 would round."""
    source, _ = make(replace(CASES["fp8-moe"], model="qwen3_moe-ragged"), tmp_path)
    shutil.copytree(source, tmp_path / "other")
    name = "model.layers.1.mlp.experts.1.gate_proj.weight_scale_inv"
    scales = change(tmp_path / "other", name, None)
    change(tmp_path / "other", name, torch.nextafter(scales, torch.ones(())))
    (difference,) = verify(source, tmp_path / "other").differences
    assert difference.startswith("decoder.layers.1.mlp.experts.linear_fc1.weight[1, 0, 0]: ")
    (found,) = diff(source, tmp_path / "other").tensors
    assert found.name == "decoder.layers.1.mlp.experts.linear_fc1.weight" and 0 < found.relative < 1e-6
    assert verify(source, source).equal and diff(source, source).equal


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_quantized_parameters_are_read_in_parts(
    hf_folder: HFFolder, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in one parameter, of which no whole copy is made, give what parts of any size give."""
    import_hf(hf_folder("qwen3_moe", dtype=torch.float32), tmp_path / "ours")
    quantize(tmp_path / "ours", tmp_path / "q", recipe)
    folders = (tmp_path / "ours", tmp_path / "q")
    whole = diff(*folders).tensors
    monkeypatch.setattr(StoredParameters, "quantized", lambda *_: pytest.fail("a whole parameter"))
    monkeypatch.setattr(bands, "BAND_ELEMENTS", 1 << 10)
    monkeypatch.setattr(difference, "_PART", 700)
    parts = diff(*folders).tensors
    assert len(whole) == 8 and any(".experts." in found.name for found in whole)
    for a, b in zip(whole, parts, strict=True):
        assert (a.name, a.differing, a.elements, a.largest) == (b.name, b.differing, b.elements, b.largest)
        assert a.relative == pytest.approx(b.relative, rel=1e-9)


def test_numbers_that_float32_does_not_tell_apart(hf_folder: HFFolder, tmp_path: Path) -> None:
    source, name = hf_folder("llama", dtype=torch.float32), "model.norm.weight"
    shutil.copytree(source, tmp_path / "other")
    wide = change(source, name, None).double()
    change(source, name, wide)
    change(tmp_path / "other", name, wide * (1 + 2.0**-40))
    (found,) = diff(source, tmp_path / "other").tensors
    assert found.relative == pytest.approx(2.0**-40, rel=1e-3)


def test_verify_says_how_many_more_differences_there_are() -> None:
    report = VerifyReport()
    for number in range(23):
        report.add(f"w{number}: 0.0 and 1.0")
    assert len(report.to_dict()["differences"]) == 23
    lines = str(report).splitlines()
    assert len(lines) == 22 and lines[20] == "  w19: 0.0 and 1.0" and lines[21] == "  ... and 3 more (--json lists all)"
    report.differences = report.differences[:20]
    assert "more" not in str(report)
