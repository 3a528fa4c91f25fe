"""Files that hold the tied embedding twice: the copy comes back on export, under the name that it had."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import te_models.checkpoints as checkpoints
from te_models import GPTModel
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import assert_same_bits, stored

COPIES = {
    "gemma": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt_neox": ("embed_out.weight", "gpt_neox.embed_in.weight"),
    "gpt_neox-other-name": ("lm_head.weight", "gpt_neox.embed_in.weight"),
}


def folder_with_a_copy(case: str, folder: Path) -> Path:
    copy, embedding = COPIES[case]
    with warnings.catch_warnings(action="ignore"):
        make(case.removesuffix("-other-name"), dtype=torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = {
        name: tensor for name, tensor in stored(folder).items() if name not in ("lm_head.weight", "embed_out.weight")
    }
    save_file({**tensors, copy: tensors[embedding].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.sentinels("gpt_neox-other-name")
@pytest.mark.parametrize("case", COPIES)
@torch.no_grad()
def test_it_comes_back_whichever_way_the_model_goes(tmp_path: Path, case: str) -> None:
    source, (copy, embedding) = folder_with_a_copy(case, tmp_path / "hf"), COPIES[case]
    expected = stored(source)
    assert checkpoints.import_hf(source, tmp_path / "ours").ignored == (copy,)
    GPTModel.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    checkpoints.relayout(tmp_path / "ours", tmp_path / "per-gemm", "per-gemm")
    for folder in ("ours", "saved", "per-gemm"):
        assert copy not in stored(tmp_path / folder)
        plan = checkpoints.export_hf(tmp_path / folder, tmp_path / f"{folder}-back")
        assert_same_bits(stored(tmp_path / f"{folder}-back"), expected)
        assert (copy, "exact", "BF16", "BF16") in plan.report.lines
    checkpoints.quantize(tmp_path / "ours", tmp_path / "mxfp8", "mxfp8")
    plan = checkpoints.export_hf(tmp_path / "mxfp8", tmp_path / "mxfp8-back", dtype="float32")
    again = stored(tmp_path / "mxfp8-back")
    assert torch.equal(again[copy], expected[copy].float()) and torch.equal(again[embedding], again[copy])
    assert (copy, "converted", "BF16", "F32") in plan.report.lines
    assert checkpoints.toy(source, tmp_path / "toy", layers=1).ignored == ()
    assert torch.equal(stored(tmp_path / "toy")[copy], expected[copy])
    checkpoints.dequantize(tmp_path / "mxfp8", tmp_path / "values")
    checkpoints.export_hf(tmp_path / "values", tmp_path / "values-back")
    assert stored(tmp_path / "values-back").keys() == expected.keys()


def test_the_copy_is_of_the_trained_embedding(tmp_path: Path) -> None:
    source, (copy, embedding) = folder_with_a_copy("gemma", tmp_path / "hf"), COPIES["gemma"]
    model = GPTModel.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        model.embedding.word_embeddings.weight.mul_(2)
    model.save_pretrained(tmp_path / "ours")
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "back")
    again, before = stored(tmp_path / "back"), stored(source)
    assert torch.equal(again[copy], again[embedding]) and torch.equal(again[copy], before[embedding] * 2)


def test_files_without_one_and_other_families_get_none(tmp_path: Path) -> None:
    source = folder_with_a_copy("gemma", tmp_path / "hf")
    checkpoints.import_hf(source, tmp_path / "ours")
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["source"]["tied_copies"] == ["lm_head.weight"]
    (tmp_path / "ours/manifest.json").unlink()  # the folder is edited
    for names in (["model.norm.weight", "../x"], ["embed_out.weight"]):  # no copies in this family
        config["source"]["tied_copies"] = names
        (tmp_path / "ours/config.json").write_text(json.dumps(config))
        checkpoints.export_hf(tmp_path / "ours", tmp_path / "back", overwrite=True)
        assert stored(tmp_path / "back").keys() == stored(source).keys() - {"lm_head.weight"}
    for wrong in ("lm_head.weight", [1], {"a": 1}):
        config["source"]["tied_copies"] = wrong
        (tmp_path / "ours/config.json").write_text(json.dumps(config))
        with pytest.raises(checkpoints.CheckpointError, match="tied_copies are not a list of names"):
            checkpoints.open_checkpoint(tmp_path / "ours")


def with_output_layer(folder: Path, tensor: torch.Tensor | None) -> Path:
    others = {name: t for name, t in stored(folder).items() if name != "lm_head.weight"}
    layer = {} if tensor is None else {"lm_head.weight": tensor}
    save_file(others | layer, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_one_that_is_no_copy_is_a_difference(tmp_path: Path) -> None:
    source = folder_with_a_copy("gemma", tmp_path / "hf")
    checkpoints.import_hf(source, tmp_path / "ours")
    true = stored(source)["lm_head.weight"]
    wrong = true.clone()
    wrong[1, 2] = 3.0
    folders = {name: shutil.copytree(source, tmp_path / name) for name in ("none", "wrong", "wrong-too", "short")}
    for name, tensor in {"none": None, "wrong": wrong, "wrong-too": wrong, "short": true[1:].clone()}.items():
        with_output_layer(folders[name], tensor)
    for other in (source, folders["none"], tmp_path / "ours"):
        for a, b in ((folders["wrong"], other), (other, folders["wrong"])):
            report = checkpoints.verify(a, b)
            assert not report.equal and len(report.differences) == 1
            assert report.differences[0].startswith("lm_head.weight[1, 2]: ")
            assert not checkpoints.diff(a, b).equal and checkpoints.diff(a, b).notes == report.differences
        assert checkpoints.verify(source, other).equal and checkpoints.diff(source, other).equal
        assert (
            checkpoints.verify(other, folders["none"]).equal and not checkpoints.verify(other, folders["short"]).equal
        )
    assert (
        checkpoints.verify(folders["wrong"], folders["wrong-too"]).equal
        and checkpoints.diff(folders["wrong"], folders["wrong-too"]).equal
    )
