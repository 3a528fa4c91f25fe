"""Scales of activations between forms of a family: one tensor per expert, and one for all of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, export_hf, import_hf, open_checkpoint, toy, verify
from te_models.checkpoints.folder.te_folder import TEFolder
from te_models.checkpoints.formats.details import activation_scales, details_of, group_scales
from te_models.checkpoints.io.strict_json import parse_object
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back
from tests.checkpoints.quantized_cases import CASES, make

LAYER = "model.layers.0.mlp.experts"
GATE_UP = f"{LAYER}.gate_up_proj_input_scale"


def fused(root: Path) -> Path:
    """Return a folder of three experts, fused, in ModelOpt's FP8."""
    source, _ = make(CASES["modelopt-fp8"], root)
    import_hf(source, root / "single")
    assert not export_hf(root / "single", root / "fused", form="fused").ignored
    return root / "fused"


def change(folder: Path, changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = stored(folder) | changes
    (folder / "manifest.json").unlink(missing_ok=True)  # the folder of somebody else, who writes none
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_each_expert_s_scale_in_one_tensor(tmp_path: Path) -> None:
    folder = fused(tmp_path)
    single, tensors = stored(tmp_path / "quantized"), stored(folder)
    for name, parts in {GATE_UP: ("gate_proj", "up_proj"), f"{LAYER}.down_proj_input_scale": ("down_proj",)}.items():
        for part in parts:
            expected = torch.stack([single[f"{LAYER}.{e}.{part}.input_scale"] for e in range(3)])
            assert torch.equal(tensors[name], expected)
    assert len(set(tensors[GATE_UP].tolist())) == 3


@pytest.mark.sentinels("shape3")
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
def test_fused_scales_come_back_and_go_to_each_expert(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = fused(tmp_path)
    count = torch.Size(shape).numel()
    scale = (torch.rand(count, generator=torch.Generator().manual_seed(2)) + 0.5).view(shape)
    tensors = change(folder, {GATE_UP: scale})
    import_hf(folder, tmp_path / "ours")
    assert not export_hf(tmp_path / "ours", tmp_path / "back").ignored
    assert_same_bits(tensors, stored(tmp_path / "back"))
    assert not export_hf(tmp_path / "ours", tmp_path / "published", form="published").ignored
    published = stored(tmp_path / "published")
    for e in range(3):
        found = [published[f"{LAYER}.{e}.{part}.input_scale"] for part in ("gate_proj", "up_proj")]
        assert all(torch.equal(x.flatten()[0], scale.flatten()[e if count == 3 else 0]) for x in found)
        assert all(x.shape == ((1,) if shape[-1:] == (1,) else ()) for x in found)


def test_scales_that_differ_are_named_and_stay_in_our_folder(tmp_path: Path) -> None:
    """Of gate and up of one expert: a fused tensor has one scale for both."""
    source, _ = make(CASES["modelopt-fp8"], tmp_path)
    tensors = change(source, {f"{LAYER}.1.up_proj.input_scale": torch.tensor(9.0)})
    import_hf(source, tmp_path / "ours")
    plan = export_hf(tmp_path / "ours", tmp_path / "fused", form="fused")
    parts = {f"{LAYER}.{e}.{part}.input_scale" for e in range(3) for part in ("gate_proj", "up_proj")}
    assert set(plan.ignored) == parts and GATE_UP not in stored(tmp_path / "fused")
    assert f"{LAYER}.down_proj_input_scale" in stored(tmp_path / "fused")
    assert not export_hf(tmp_path / "ours", tmp_path / "back").ignored
    assert_same_bits(tensors, stored(tmp_path / "back"))


def test_other_shapes_stay_with_their_form(tmp_path: Path) -> None:
    folder = fused(tmp_path)
    tensors = change(folder, {GATE_UP: torch.rand(2, 2)})
    assert_same_bits(stored(there_and_back(folder, tmp_path)), tensors)
    assert export_hf(tmp_path / "ours", tmp_path / "published", form="published").ignored == (GATE_UP,)


def test_a_toy_has_the_scales_of_its_experts(tmp_path: Path) -> None:
    folder = fused(tmp_path)
    toy(folder, tmp_path / "toy", layers=1, experts=2)
    assert torch.equal(stored(tmp_path / "toy")[GATE_UP], stored(folder)[GATE_UP][:2])


def test_folders_that_hold_each_scale_with_its_dtype_and_shape_are_read(tmp_path: Path) -> None:
    """As imports wrote them before."""
    source, _ = make(CASES["modelopt-fp8"], tmp_path)
    import_hf(source, tmp_path / "ours")
    path = tmp_path / "ours/config.json"
    config = json.loads(path.read_text())
    scales = activation_scales(config["source"]["quantization"])
    old = {name: ["F32", list(t.shape), t.flatten().tolist()] for name, t in scales.items()}
    assert len(old) > 9
    config["source"]["quantization"]["activations"] = old
    path.write_text(json.dumps(config))
    (tmp_path / "ours/manifest.json").unlink()  # it would say that the file was edited
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(source), stored(tmp_path / "back"))


@pytest.mark.slow
def test_a_folder_holds_the_scales_of_the_largest_mixtures(tmp_path: Path) -> None:
    source, _ = make(CASES["modelopt-fp8"], tmp_path)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.input_scale": torch.tensor([e / 7])
        for layer in range(60)
        for e in range(384)
        for part in ("gate", "up", "down")
    }
    with open_checkpoint(source) as ckpt:
        assert ckpt.source is not None and ckpt.quantized is not None
        details = details_of(ckpt.quantized) | {"numbers": dict.fromkeys(tensors, 0.1)}
        config, origin = ckpt.config, ckpt.source
    details["activations"] = group_scales(tensors)
    folder = TEFolder("grouped", config, replace(origin, quantization=details))
    again = TEFolder.from_dict(parse_object(folder.to_bytes(), "config.json"))
    assert again.source.quantization is not None
    found = activation_scales(again.source.quantization)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
    details["activations"] = {name: ["F32", [1], t.tolist()] for name, t in tensors.items()}
    folder = TEFolder("grouped", config, replace(origin, quantization=details))
    with pytest.raises(CheckpointError, match=r"config\.json that would be written holds more than the 400000 values"):
        folder.to_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("gone", [False, True])
def test_a_weight_gets_no_scales_that_it_did_not_have(tmp_path: Path, gone: bool) -> None:
    """Those of keys and values are beside two of three tensors that become one matrix (ModelOpt with an FP8 cache)."""
    source, _ = make(CASES["modelopt-fp8"], tmp_path)
    attention = "model.layers.0.self_attn"
    tensors = stored(source)
    if gone:
        del tensors[f"{attention}.q_proj.input_scale"], tensors[f"{LAYER}.0.up_proj.input_scale"]
    scales = {f"{attention}.{x}_proj.{x}_scale": torch.tensor(0.5) for x in "kv"}
    save_file(tensors | scales, source / "model.safetensors", metadata={"format": "pt"})
    import_hf(source, tmp_path / "ours")
    assert not export_hf(tmp_path / "ours", tmp_path / "back").ignored
    assert_same_bits(tensors | scales, stored(tmp_path / "back"))
    assert not export_hf(tmp_path / "ours", tmp_path / "fused", form="fused").ignored
    assert {n for n in stored(tmp_path / "fused") if n.endswith(("k_scale", "v_scale"))} == set(scales)


@pytest.mark.slow
def test_verify_compares_them(tmp_path: Path) -> None:
    source, _ = make(CASES["modelopt-fp8"], tmp_path)
    there_and_back(source, tmp_path)
    export_hf(tmp_path / "ours", tmp_path / "other", format="float-quantized")
    for other in ("ours", "back", "other"):  # another format has a place for none of them
        assert verify(source, tmp_path / other).equal and verify(tmp_path / other, source).equal
    name = f"{LAYER}.1.up_proj.input_scale"
    before = stored(source)[name].item()
    change(tmp_path / "back", {name: torch.tensor(9.0)})
    report = verify(tmp_path / "ours", tmp_path / "back")
    assert not report.equal and report.differences == [f"{name}: [{before}] and [9.0]"]
    tensors = {n: t for n, t in stored(source).items() if n != name}
    save_file(tensors, tmp_path / "back/model.safetensors", metadata={"format": "pt"})
    report = verify(tmp_path / "back", source)
    assert not report.equal and report.differences == [f"{name}: only in {source}"]
