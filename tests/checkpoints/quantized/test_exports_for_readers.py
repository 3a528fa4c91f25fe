"""Exports that leave the format to us, or name one, as the packages that read them understand their declarations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import export_hf, import_hf, quantize
from te_models.checkpoints.formats import SEPARATE
from tests.checkpoints.hf_cases import stored, transformers
from tests.checkpoints.quantized_cases import CASES, make


def exported(root: Path, recipe: str, form: str | None) -> tuple[Path, dict[str, torch.Tensor], list[str]]:
    """Return a dense model's folder quantized in a format, its values in float32 by name, and the export's notes."""
    (root / "case").mkdir(parents=True)
    _, reference = make(CASES["fp8-dense"], root / "case")
    import_hf(reference, root / "plain")
    quantize(root / "plain", root / "quantized", recipe)
    plan = export_hf(root / "quantized", root / "hf", format=form, allow_requantize=form == "mxfp4-pack-quantized")
    import_hf(root / "hf", root / "values", dequantize=True, dtype="float32")
    export_hf(root / "values", root / "values-hf")
    return root / "hf", stored(root / "values-hf"), list(plan.notes)


def declared(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.sentinels("nvfp4-nvfp4-pack-quantized-0.00390625")
@pytest.mark.parametrize(
    ("recipe", "form", "error"),
    [
        ("current", "float-quantized", 0.0),
        ("block", "float-quantized", 0.0),
        ("mxfp8", "mxfp8-quantized", 0.0),
        ("mxfp8", "mxfp4-pack-quantized", 0.0),
        ("nvfp4", "nvfp4-pack-quantized", 2.0**-8),  # it decodes to bfloat16
    ],
)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_compressed_tensors_decodes_what_is_written(tmp_path: Path, recipe: str, form: str, error: float) -> None:
    pytest.importorskip("compressed_tensors", reason="the package whose formats these are reads them: te_models[test]")
    folder, values, _ = exported(tmp_path, recipe, form)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    found = model.state_dict()
    for name, value in values.items():
        torch.testing.assert_close(found[name].float(), value, rtol=error, atol=0, msg=name)


@pytest.mark.sentinels("block-fp8", "nvfp4-compressed-tensors")
@pytest.mark.parametrize(
    ("recipe", "method"), [("current", "fp8"), ("block", "fp8"), ("mxfp8", "mxfp8"), ("nvfp4", "compressed-tensors")]
)
def test_transformers_knows_the_format_that_is_chosen_unasked(tmp_path: Path, recipe: str, method: str) -> None:
    """It reads no hf_quant_config.json: a folder that declares itself there alone loads there as codes."""
    folder, values, notes = exported(tmp_path, recipe, None)
    assert declared(folder)["quant_method"] == method and not (folder / SEPARATE).exists() and not notes
    if method == "compressed-tensors":
        return  # the test above loads it
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, value in values.items():  # on CPU it dequantizes to bfloat16
        torch.testing.assert_close(found[name].float(), value, rtol=2.0**-8, atol=0, msg=name)


def test_a_declaration_says_what_readers_do_with_activations(tmp_path: Path) -> None:
    """vLLM takes no experts in FP8 whose activations stay in high precision, and no blocks."""
    wanted = {"current": {"strategy": "tensor"}, "block": {"strategy": "group", "group_size": 128}}
    for recipe, expected in wanted.items():
        group = declared(exported(tmp_path / recipe, recipe, "float-quantized")[0])["config_groups"]["group_0"]
        assert group["format"] == "float-quantized" and group["weights"]["dynamic"] is False
        rest = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": True}
        assert group["input_activations"] == expected | rest


@pytest.mark.slow
def test_modelopt_without_scales_of_activations(tmp_path: Path) -> None:
    """NVFP4 has a name for that; FP8 has none, so the plan says it."""
    folder, _, notes = exported(tmp_path / "nvfp4", "nvfp4", "modelopt-nvfp4")
    algorithm = json.loads((folder / SEPARATE).read_text())["quantization"]
    assert (algorithm["quant_algo"], algorithm["group_size"]) == ("W4A16_NVFP4", 16)
    assert len(notes) == 1 and "transformers reads no hf_quant_config.json" in notes[0]
    folder, _, notes = exported(tmp_path / "fp8", "current", "modelopt-fp8")
    assert len(notes) == 2 and "input_scale" in notes[0]
    import_hf(folder, tmp_path / "again")
