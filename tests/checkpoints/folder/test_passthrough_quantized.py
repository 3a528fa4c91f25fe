"""Quantized layers that the model does not use, where conversions change or drop the declaration of their format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import dequantize, export_hf, import_hf, quantize
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back
from tests.checkpoints.quantized_cases import CASES, make

LAYER = "model.layers.2."
FORMATS = ("fp8-latent", "modelopt-nvfp4-latent")


def folder(case: str, root: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a quantized folder whose last layer has a copy behind it, and the values of that, in bfloat16."""
    source, reference = make(CASES[case], root)
    for path in (source, reference):
        tensors = stored(path)
        behind = {
            n.replace("layers.1.", "layers.2."): t.clone()
            for n, t in tensors.items()
            if n.startswith("model.layers.1.")
        }
        save_file(tensors | behind, path / "model.safetensors", metadata={"format": "pt"})
    values = {name: t for name, t in stored(reference).items() if name.startswith(LAYER)}
    return source, {name: t for name, t in values.items() if "input_scale" not in name}


def behind(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for name, t in stored(path).items() if name.startswith(LAYER)}


def declared(path: Path) -> Any:
    separate = path / "hf_quant_config.json"
    found = json.loads((path / "config.json").read_text()).get("quantization_config")
    return json.loads(separate.read_text()) if separate.exists() else found


@pytest.mark.sentinels("fp8-latent")
@pytest.mark.parametrize("case", FORMATS)
def test_without_a_declaration_they_are_values(tmp_path: Path, case: str) -> None:
    source, values = folder(case, tmp_path)
    plan = import_hf(source, tmp_path / "values", dequantize=True)
    assert {name.removeprefix("carried.") for name in plan.passthrough} == values.keys() and plan.notes == ()
    import_hf(source, tmp_path / "ours")
    dequantize(tmp_path / "ours", tmp_path / "later")
    for ours, options in (("values", {}), ("later", {}), ("ours", {"dequantize": True})):
        plan = export_hf(tmp_path / ours, tmp_path / f"{ours}-back", **options)
        assert declared(tmp_path / f"{ours}-back") is None
        assert_same_bits(behind(tmp_path / f"{ours}-back"), values)
        assert set(plan.passthrough) == values.keys()
    export_hf(tmp_path / "values", tmp_path / "wide", dtype="float32")
    assert_same_bits(behind(tmp_path / "wide"), values)
    import_hf(source, tmp_path / "float32", dequantize=True, dtype="float32")
    found = {n.removeprefix("carried."): t for n, t in stored(tmp_path / "float32").items() if n.startswith("carried.")}
    assert all(torch.equal(t.to(torch.bfloat16), values[name]) for name, t in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", FORMATS)
def test_another_declaration_excludes_their_values(tmp_path: Path, case: str) -> None:
    source, values = folder(case, tmp_path)
    import_hf(source, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "other", format="mxfp8-quantized", allow_requantize=True)
    import_hf(source, tmp_path / "float8", storage="float8", allow_requantize=True)
    export_hf(tmp_path / "float8", tmp_path / "again", format="float-quantized")
    import_hf(source, tmp_path / "values", dequantize=True)
    quantize(tmp_path / "values", tmp_path / "fp8", "block")
    export_hf(tmp_path / "fp8", tmp_path / "anew", format="fp8")
    excluded = {name.removesuffix(".weight") for name, t in values.items() if t.dim() >= 2}
    for back, key in (("other", "ignore"), ("again", "ignore"), ("anew", "modules_to_not_convert")):
        assert_same_bits(behind(tmp_path / back), values)
        modules = declared(tmp_path / back)[key]
        assert excluded <= set(modules) and "lm_head" in modules and len(modules) == len(set(modules))
        import_hf(tmp_path / back, tmp_path / f"{back}-ours")


@pytest.mark.sentinels("fp8-latent")
@pytest.mark.parametrize("case", FORMATS)
def test_under_their_declaration_they_stay_as_they_are(tmp_path: Path, case: str) -> None:
    source, _ = folder(case, tmp_path)
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))
    assert declared(tmp_path / "back") == declared(source)


def test_what_is_no_weight_in_the_format_stays_and_is_named(tmp_path: Path) -> None:
    source, values = folder("fp8-latent", tmp_path)
    odd = {f"{LAYER}eh_proj.weight": torch.zeros(3, 5, dtype=torch.float8_e4m3fn)}
    save_file(stored(source) | odd, source / "model.safetensors", metadata={"format": "pt"})
    plan = import_hf(source, tmp_path / "ours", dequantize=True)
    assert plan.notes == (
        "carried.model.layers.2.eh_proj.weight, which the model does not use, stay in FP8, but are no weights in fp8",
    )
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(behind(tmp_path / "back"), values | odd)
