"""Refit: a folder of another format takes the weights of a later state, with the bits of a fresh export, and files that
do not change are not written."""

import copy
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, check_manifest, export_hf, quantize, refit, reshard
from tests.training.runs import assert_same_bits, tensors_under, tiny_model


def model_of() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(tiny_model(), dtype=torch.bfloat16)


def trained(model: GPTModel, *parts: str) -> GPTModel:
    """A step of SGD on the parameters whose names have one of these parts."""
    found, ids = copy.deepcopy(model), torch.arange(32)[None]
    found(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if any(part in name for part in parts or ("",)):
                parameter -= 0.5 * parameter.grad
    return found


@pytest.mark.parametrize("kind", ["mxfp8", "hf", "hf-mxfp8"])
def test_the_bits_are_those_of_a_fresh_export(tmp_path: Path, kind: str) -> None:
    recipe = "mxfp8" if "mxfp8" in kind else None

    def export(model: GPTModel, name: str) -> Path:
        folder = tmp_path / name
        model.save_pretrained(tmp_path / f"{name}-saved")
        if recipe is None:
            export_hf(tmp_path / f"{name}-saved", folder)
            return folder
        quantized = folder if kind == "mxfp8" else tmp_path / f"{name}-quantized"
        quantize(tmp_path / f"{name}-saved", quantized, recipe)
        if kind != "mxfp8":
            export_hf(quantized, folder)
        return folder

    model = model_of()
    served, fresh = export(model, "served"), export(trained(model), "fresh")
    done = refit(trained(model), served, recipe=recipe)
    assert done.replaced == ("model.safetensors",) and not done.unchanged and done.tensors
    assert_same_bits(tensors_under(served), tensors_under(fresh))
    assert check_manifest(served) > 0
    times = {path: path.stat().st_mtime_ns for path in served.iterdir()}
    again = refit(trained(model), served, recipe=recipe)
    assert not again.replaced and not again.tensors
    assert times == {path: path.stat().st_mtime_ns for path in served.iterdir()}
    assert not list(tmp_path.glob(".*"))


def test_only_files_whose_tensors_changed_are_written(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "saved")
    reshard(tmp_path / "saved", tmp_path / "served", max_shard_bytes=100_000)
    trained(model, "layers.1.").save_pretrained(tmp_path / "later")
    reshard(tmp_path / "later", tmp_path / "sharded", max_shard_bytes=100_000)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "served").iterdir()}
    done = refit(tmp_path / "sharded", tmp_path / "served")
    assert done.replaced and done.unchanged and all("layers.1." in name for name in done.tensors)
    now = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "served").iterdir()}
    assert {name for name in now if now[name] != times[name]} == {*done.replaced, "manifest.json"}
    assert_same_bits(tensors_under(tmp_path / "served"), tensors_under(tmp_path / "sharded"))


def test_a_folder_of_another_form_is_refused_and_left(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "saved")
    quantize(tmp_path / "saved", tmp_path / "served", "mxfp8")
    before = tensors_under(tmp_path / "served")
    for options in ({}, {"recipe": "block"}):
        with pytest.raises(
            CheckpointError, match=r"was made otherwise: .* allowed: the recipe and options that the folder"
        ):
            refit(trained(model), tmp_path / "served", **options)
    with pytest.raises(CheckpointError, match="is a te_models folder; allowed without an export: no family"):
        refit(model, tmp_path / "served", recipe="mxfp8", family="llama")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        refit(model, tmp_path / "nothing")
    assert_same_bits(before, tensors_under(tmp_path / "served"))
