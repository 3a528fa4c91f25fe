"""Exports of tied and untied models in every format, as transformers computes them: its logits against ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import export_hf, import_hf, quantize
from te_models.checkpoints.formats import SEPARATE, WRITABLE
from tests.checkpoints import quantized_cases
from tests.checkpoints.families import test_text_part as images
from tests.checkpoints.hf_cases import transformers

SIZES = quantized_cases.SIZES | {"vocab_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 128},  # no choice to flip
}
RECIPES = {
    "fp8": "block",
    "fp8-per-tensor": "current",
    "mxfp8": "mxfp8",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp8",
    "mxfp8-quantized": "mxfp8",
    "pack-quantized": "int4",
    "float-quantized": "current",
    "float-quantized by block": "block",
}
"""Format -> the recipe whose stored weights it takes. mxfp4 is gpt_oss's, and ModelOpt's have no reader here."""
DENSE_ONLY = {"nvfp4-pack-quantized", "mxfp8-quantized", "float-quantized by block"}
"""Formats in which transformers refuses experts, or computes them wrongly, which an export's note says."""
PACKAGE = [name for name in RECIPES if "quantized" in name]


def test_every_format_is_here_or_has_no_reader() -> None:
    others = {"mxfp4"} | {name for name in WRITABLE if name.startswith("modelopt-")}
    assert {name.split(" ")[0] for name in RECIPES} | others == set(WRITABLE)


def make(family: str, *, tied: bool) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(family, **SIZES, **MODELS[family], tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.06)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(0))


def exported(theirs: transformers.PreTrainedModel, root: Path, form: str) -> tuple[Path, torch.Tensor, float]:
    """Return the folder in a format, the logits of its values in our model, and how far bfloat16 takes them away."""
    theirs.save_pretrained(root / "hf")
    import_hf(root / "hf", root / "plain")
    quantize(root / "plain", root / "quantized", RECIPES[form])
    folder = root / "exported"
    export_hf(root / "quantized", folder, format=form.split(" ")[0], allow_requantize=form.startswith("mxfp4"))
    import_hf(folder, root / "values", dequantize=True, dtype="float32")
    ours = GPTModel.from_pretrained(root / "values").eval()
    expected = ours(tokens()).logits
    return folder, expected, float((ours.bfloat16()(tokens()).logits.float() - expected).abs().max())


def check(folder: Path, expected: torch.Tensor, rounding: float, form: str, auto: Any) -> None:
    """Compare with what transformers loads: the values in float32, and the quantized modules as they compute."""
    ways: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {"as it is": (torch.float32, {}, 0.0)}
    if form in PACKAGE:
        assert pytest.importorskip("compressed_tensors", reason="reads these formats: te_models[test]")
        values = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
        # It decodes FP4 and integers in bfloat16. Where that is declared it rounds activations to E4M3, 2 ** 4 times as
        # coarse.
        decoded = 2 * rounding if "4" in form or form == "pack-quantized" else 0.0
        ways = {
            "values": (torch.float32, values, decoded),
            "as it is": (torch.bfloat16, {}, (16 if form.startswith("float") else 4) * rounding),
        }
    for way, (dtype, options, bound) in ways.items():
        model, info = auto.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, attn_implementation="eager", **options
        )
        assert not any(info.values()), (way, info)
        got = model.eval()(input_ids=tokens()).logits.float()
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max() + bound, way


@pytest.mark.sentinels("llama-tied-nvfp4-pack-quantized", "llama-untied-float-quantized")
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("form", RECIPES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_logits_are_ours(tmp_path: Path, family: str, tied: bool, form: str) -> None:
    if family != "llama" and form in DENSE_ONLY:
        pytest.skip("transformers reads no experts in this format: docs/quantized.md")
    folder, expected, rounding = exported(make(family, tied=tied), tmp_path, form)
    check(folder, expected, rounding, form, transformers.AutoModelForCausalLM)


@pytest.mark.sentinels("mistral3-of-mistral-mxfp8-quantized")
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("form", [name for name in RECIPES if name not in ("fp8", "float-quantized by block")])
@pytest.mark.parametrize("case", ["gemma3", "mistral3-of-ministral3", "mistral3-of-mistral"])
@torch.no_grad()
def test_models_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, form: str) -> None:
    """transformers holds their modules under other names than files."""
    for name, value in {"hidden_size": 256, "intermediate_size": 256}.items():
        monkeypatch.setitem(images.SIZES, name, value)
    folder, expected, rounding = exported(images.make(case), tmp_path, form)
    check(folder, expected, rounding, form, transformers.AutoModelForImageTextToText)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_modules_that_are_not_quantized_are_named(tmp_path: Path, tied: bool) -> None:
    """In every declaration: also in ModelOpt's, whose own exporter names the output layer of tied models."""
    make("llama", tied=tied).save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "plain")
    for form in ("modelopt-nvfp4", "mxfp8", "nvfp4-pack-quantized"):
        recipe = "mxfp8" if form == "mxfp8" else "nvfp4"
        if not (tmp_path / recipe).exists():
            quantize(tmp_path / "plain", tmp_path / recipe, recipe)
        plan = export_hf(tmp_path / recipe, tmp_path / f"{form}-out", format=form)
        if form.startswith("modelopt"):
            named = json.loads((tmp_path / f"{form}-out" / SEPARATE).read_text())["quantization"]["exclude_modules"]
            assert any("transformers reads no hf_quant_config.json" in note for note in plan.notes)
        else:
            declared = json.loads((tmp_path / f"{form}-out" / "config.json").read_text())["quantization_config"]
            named = declared.get("ignore", declared.get("modules_to_not_convert"))
        assert named == ["lm_head"]


@pytest.mark.parametrize(("recipe", "form"), [("nvfp4", "nvfp4-pack-quantized"), ("mxfp8", "mxfp4")])
def test_an_export_says_what_transformers_computes_wrongly(tmp_path: Path, recipe: str, form: str) -> None:
    make("qwen3_moe", tied=False).save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", recipe)
    notes = export_hf(tmp_path / "quantized", tmp_path / "out", format=form, allow_requantize=form == "mxfp4").notes
    assert len(notes) == 1 and "transformers reads" in notes[0]
