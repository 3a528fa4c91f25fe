"""toy of quantized folders: the stored numbers and scales of what stays, byte for byte, under the same declaration."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import GPTModel
from te_models.checkpoints import check_manifest, import_hf, toy
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back
from tests.checkpoints.quantized.test_quantized_hf import ROUNDED
from tests.checkpoints.quantized_cases import CASES, CHANNEL, edit_config, make

ALL = {**CASES, "channel": CHANNEL}


def number_of_experts(folder: Path) -> int | None:
    """How many experts to keep, one less than there are; None in a dense model."""
    values = json.loads((folder / "config.json").read_text())
    count = next((values[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if values.get(n)), None)
    return None if count is None else count - 1


@pytest.mark.sentinels("fp8-latent", "nvfp4-pack-quantized")
@pytest.mark.parametrize("case", ALL)
def test_the_stored_numbers_are_those_of_the_original(tmp_path: Path, case: str) -> None:
    source, reference = make(ALL[case], tmp_path)
    experts = number_of_experts(source)
    plan = toy(source, tmp_path / "toy", layers=1, experts=experts)
    assert {line.kind for line in plan.report.lines.values()} == {"exact"}
    check_manifest(tmp_path / "toy")
    originals, parts = stored(source), stored(tmp_path / "toy")
    dense_first = "first_k_dense_replace" in json.loads((source / "config.json").read_text())
    for name, part in parts.items():
        whole = originals[name.replace("layers.0.", "layers.1.") if dense_first else name]
        assert part.dtype == whole.dtype and part.dim() == whole.dim(), name
        assert_same_bits({name: whole[tuple(slice(n) for n in part.shape)].contiguous()}, {name: part})
        assert part.shape == whole.shape or part.shape[0] == experts, name
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).exists():
            before, after = (json.loads((folder / name).read_text()) for folder in (source, tmp_path / "toy"))
            declared = "quantization" if "quantization" in before else "quantization_config"
            layers = (before.get(declared) or {}).get("quantized_layers", {})  # those that are left, by their names
            for layer in [layer for layer in layers if ".layers.1." in layer]:
                del layers[layer]
            assert before.get(declared) == after.get(declared)
        else:
            assert not (tmp_path / "toy" / name).exists()
    # it is a folder of that format: the values are those of the plain model's toy, and it comes back whole
    toy(reference, tmp_path / "plain", layers=1, experts=experts)
    import_hf(tmp_path / "plain", tmp_path / "expected")
    import_hf(tmp_path / "toy", tmp_path / "values", dequantize=True)
    found, expected = stored(tmp_path / "values"), stored(tmp_path / "expected")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).abs()
        assert (error <= (2.0**-8 * value.double().abs() if case in ROUNDED else 0)).all(), name
    if case in CASES:
        assert_same_bits(stored(there_and_back(tmp_path / "toy", tmp_path)), parts)
        assert GPTModel.from_pretrained(tmp_path / "ours").config.num_layers == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp8-latent", "modelopt-nvfp4-latent"])
def test_a_quantized_layer_that_predicts_further_tokens_is_kept(tmp_path: Path, case: str) -> None:
    """Behind the only layer that stays: the numbers and scales of as many experts, byte for byte."""
    source, _ = make(CASES[case], tmp_path)
    file, at = source / "model.safetensors", "model.layers.1."
    tensors = load_file(file)
    behind = {n.replace(at, "model.layers.2."): t.clone() for n, t in tensors.items() if n.startswith(at)}
    scale = "model.layers.2.mlp.experts.1.up_proj." + ("input_scale" if "nvfp4" in case else "weight_scale_inv")
    behind[scale] *= 2
    behind["model.layers.2.eh_proj.weight"] = torch.rand(4, 8)
    save_file({**tensors, **behind}, file, {"format": "pt"})
    assert not toy(source, tmp_path / "toy", layers=1, experts=2).ignored
    parts = stored(tmp_path / "toy")
    found = {n: t for n, t in parts.items() if n.startswith(at)}
    names = {n.replace("layers.0.", "layers.1.") for n in parts if n.startswith("model.layers.0.")}
    assert found.keys() == names | {f"{at}eh_proj.weight"} and scale.replace("layers.2.", "layers.1.") in found
    for name, part in found.items():
        whole = behind[name.replace(at, "model.layers.2.")]
        assert_same_bits({name: whole[tuple(slice(n) for n in part.shape)].contiguous()}, {name: part})
    assert_same_bits(stored(there_and_back(tmp_path / "toy", tmp_path)), parts)


def test_lists_of_modules_name_the_layers_that_stay(tmp_path: Path) -> None:
    source, _ = make(CASES["fp8-latent"], tmp_path)
    names = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "re:.*layers.1.*norm", "model.layers.1*"]
    config = CASES["fp8-latent"].config
    assert config is not None
    edit_config(source, quantization_config=config | {"modules_to_not_convert": names})
    toy(source, tmp_path / "toy", layers=1)
    values = json.loads((tmp_path / "toy/config.json").read_text())["quantization_config"]
    kept = ["lm_head", "model.layers.0.mlp.gate", "re:.*layers.1.*norm", "model.layers.0*"]
    assert values == config | {"modules_to_not_convert": kept}


@pytest.mark.parametrize(("case", "scale"), [("modelopt-fp8", "k_proj.k_scale"), ("float-quantized-tensor", "k_scale")])
def test_scales_of_the_cache_stay_with_their_layer(tmp_path: Path, case: str, scale: str) -> None:
    source, _ = make(CASES[case], tmp_path)
    file = source / "model.safetensors"
    scales = {f"model.layers.{i}.self_attn.{scale}": torch.tensor(float(i + 2)) for i in range(2)}
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    toy(source, tmp_path / "toy", layers=1)
    parts = stored(tmp_path / "toy")
    assert {n: t.item() for n, t in parts.items() if "k_scale" in n} == {f"model.layers.0.self_attn.{scale}": 2.0}


def test_layers_without_quantized_weights_declare_none(tmp_path: Path) -> None:
    source, _ = make(CASES["fp8-dense"], tmp_path)
    originals = stored(source)
    for name in [name for name in originals if "layers.0." in name and name.endswith("_scale_inv")]:
        del originals[name]
        weight = name.removesuffix("_scale_inv")
        originals[weight] = torch.ones(originals[weight].shape, dtype=torch.bfloat16)
    save_file(originals, source / "model.safetensors", metadata={"format": "pt"})
    toy(source, tmp_path / "two", layers=2)
    assert_same_bits(originals, stored(tmp_path / "two"))
    toy(source, tmp_path / "one", layers=1)
    assert "quantization_config" not in json.loads((tmp_path / "one/config.json").read_text())
    import_hf(tmp_path / "one", tmp_path / "ours")
