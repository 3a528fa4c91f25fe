"""`quant_method` "fp8" with one scale per matrix: folders that transformers writes, and reads again."""

import importlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, dequantize, export_hf, import_hf, inspect, quantize, relayout, verify
from tests.checkpoints.families.test_text_part import make as make_model_with_images
from tests.checkpoints.hf_cases import assert_same_bits, refused, stored, transformers
from tests.checkpoints.quantized_cases import (
    CASES,
    STATIC_CONFIG,
    Case,
    decode_fp8,
    make,
    per_tensor,
    random_fp8,
    shared,
)

finegrained = importlib.import_module("transformers.integrations.finegrained_fp8")
quantizer_finegrained_fp8 = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")

OWN = per_tensor(False, suffix="_scale_inv", activation="activation_scale", joined=False)


def written_by_transformers(folder: Path) -> Path:
    """Save a Mistral 3 whose text model is a Ministral 3 in FP8, as the published ones are: only its linear layers."""
    model = make_model_with_images("mistral3-of-ministral3").bfloat16()
    options = {name: value for name, value in STATIC_CONFIG.items() if name != "quant_method"}
    plain = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    config = transformers.FineGrainedFP8Config(**options | {"modules_to_not_convert": plain})
    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings(action="ignore"):
        finegrained.replace_with_fp8_linear(model, plain, config)
        tensors = dict(model.state_dict())
        for name in tensors:
            if name.endswith("_scale_inv"):
                weight = name.removesuffix("_scale_inv")
                tensors[weight] = random_fp8(tuple(tensors[weight].shape), generator)
                tensors[name] = torch.rand((), generator=shared(weight)) * 4e-3 + 1e-3
            elif name.endswith("activation_scale"):
                tensors[name] = torch.rand((), generator=generator)
        model.load_state_dict(tensors, strict=True, assign=True)
        model.config.quantization_config = config
        model.save_pretrained(folder)
    return folder


def test_what_transformers_writes_is_taken_over_and_comes_back(tmp_path: Path) -> None:
    source = written_by_transformers(tmp_path / "hf")
    tensors = stored(source)
    scales = [name for name in tensors if name.endswith("weight_scale_inv")]
    assert len(scales) == 14 and all(tensors[name].shape == () for name in scales)
    assert len([name for name in tensors if name.endswith("activation_scale")]) == 14
    plan = import_hf(source, tmp_path / "ours")
    assert {line.kind for line in plan.report.lines.values()} == {"exact"}
    assert "fp8-per-tensor -> float8" in str(plan.report) and not plan.ignored
    assert inspect(tmp_path / "ours").formats == {"float8": 8}
    relayout(tmp_path / "ours", tmp_path / "split", "per-gemm")
    assert not export_hf(tmp_path / "split", tmp_path / "back").ignored
    assert_same_bits(tensors, stored(tmp_path / "back"))
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    assert config["quantization_config"]["weight_block_size"] is None
    dequantize(tmp_path / "ours", tmp_path / "values", dtype="float32")
    values = stored(tmp_path / "values")["decoder.layers.1.self_attention.linear_qkv.weight"]
    name = "language_model.model.layers.1.self_attn.k_proj.weight"
    expected = decode_fp8(tensors[name]) * tensors[f"{name}_scale_inv"].double()
    q_rows = len(tensors[name.replace("k_proj", "q_proj")])
    assert torch.equal(values[q_rows : q_rows + len(expected)], expected.float())


@pytest.mark.sentinels("imported as blocks")
@pytest.mark.parametrize("case", ["imported", "imported as blocks", "quantized"])
def test_transformers_reads_what_the_export_writes(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own decoder, on CPU."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *args: True)
    if case == "quantized":
        _, plain = make(CASES["fp8-dense"], tmp_path)
        import_hf(plain, tmp_path / "plain")
        quantize(tmp_path / "plain", tmp_path / "ours", "current")
        dequantize(tmp_path / "ours", tmp_path / "values")
        export_hf(tmp_path / "values", tmp_path / "expected")
        reference = tmp_path / "expected"
    else:
        source, reference = make(
            Case("qwen3", OWN if "blocks" in case else CASES["fp8-per-tensor"].encode, STATIC_CONFIG), tmp_path
        )
        import_hf(source, tmp_path / "ours", storage="float8_block" if "blocks" in case else None)
    export_hf(tmp_path / "ours", tmp_path / "back", format="fp8-per-tensor")
    load = transformers.AutoModelForCausalLM.from_pretrained
    with warnings.catch_warnings(action="ignore"):
        options = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=None)
        found = load(tmp_path / "back", dtype=torch.bfloat16, quantization_config=options)
        expected = load(reference, dtype=torch.bfloat16)
    assert_same_bits(found.state_dict(), expected.state_dict())


@pytest.mark.sentinels("modelopt-fp8-grouped-None", "float-quantized-tensor-grouped-float8_block")
@pytest.mark.parametrize(("layout", "storage"), [("grouped", None), ("grouped", "float8_block"), ("per-gemm", None)])
@pytest.mark.parametrize("case", ["fp8-per-tensor", "modelopt-fp8", "float-quantized-tensor"])
def test_scales_that_differ_are_exact_in_blocks(tmp_path: Path, case: str, layout: str, storage: str | None) -> None:
    """Of q, k and v, of gate and up: each has blocks of its own, which repeat its scale. Other weights have one."""
    known = CASES[case]
    fp8 = case == "fp8-per-tensor"
    encode = OWN if fp8 else per_tensor("float" in case, joined=False)
    source, reference = make(Case(known.model, encode, known.config, known.separate), tmp_path, torch.float32)
    with refused(
        r"linear_qkv.weight .* differ, and it has one scale for both .*; --storage float8_block takes", tmp_path
    ):
        import_hf(source, tmp_path / "ours", storage="float8")
    plan = import_hf(source, tmp_path / "ours", storage=storage, layout=layout)
    assert {line.kind for line in plan.report.lines.values()} == {"exact", "re-encoded exact"}
    assert set(inspect(tmp_path / "ours").formats) == {"float8_block"} | ({"float8"} if storage is None else set())
    hf, ours = (GPTModel.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "ours"))
    assert all(torch.equal(value.dequantize(), ours[name].dequantize()) for name, value in hf.items())
    dequantize(tmp_path / "ours", tmp_path / "values")
    assert verify(tmp_path / "values", reference).equal
    plan = export_hf(tmp_path / "ours", tmp_path / "back")
    assert not plan.ignored
    assert {line.kind for line in plan.report.lines.values()} == {"exact", "re-encoded exact"}
    assert_same_bits(stored(source), stored(tmp_path / "back"))


def test_blocks_that_are_cut_are_no_way_out(tmp_path: Path) -> None:
    source, _ = make(Case("qwen3_moe-ragged", OWN, STATIC_CONFIG), tmp_path)
    with pytest.raises(CheckpointError, match="it has one scale for both") as caught:
        import_hf(source, tmp_path / "ours")
    assert "--storage" not in str(caught.value) and "--allow-requantize" in str(caught.value)


def test_scales_that_differ_inside_of_a_matrix_are_no_scale_of_it(tmp_path: Path) -> None:
    source, _ = make(Case("qwen3", OWN, STATIC_CONFIG), tmp_path)
    import_hf(source, tmp_path / "ours", storage="float8_block")
    file = tmp_path / "ours/model.safetensors"
    metadata = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])["__metadata__"]
    tensors = stored(tmp_path / "ours")
    tensors["decoder.layers.1.mlp.linear_fc2.weight_scale_inv"][1, 0] *= 1.5
    save_file(tensors, file, metadata)
    (file.parent / "manifest.json").unlink()
    with refused(
        r"linear_fc2.weight of .* cannot be written as fp8-per-tensor: its scales differ inside of one matrix", tmp_path
    ):
        export_hf(tmp_path / "ours", tmp_path / "back")
    plan = export_hf(tmp_path / "ours", tmp_path / "back", format="fp8-per-tensor", allow_requantize=True)
    (line,) = (line for line in plan.report.lines.values() if line.kind == "requantized")
    assert (line.tensors, line.count) == ("mlp.linear_fc2.weight", 1) and line.max_error


@pytest.mark.parametrize("joined", [False, True])
def test_what_autofp8_wrote_is_taken_over_and_comes_back(tmp_path: Path, joined: bool) -> None:
    """`quant_method` fp8 without blocks, with the scales' names of compressed-tensors and one scale for the cache."""
    declared = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    source, reference = make(Case("qwen3", per_tensor(False, joined=joined), declared), tmp_path, torch.float32)
    scale = {"model.layers.0.self_attn.kv_scale": torch.tensor(0.3)}
    save_file({**stored(source), **scale}, source / "model.safetensors", metadata={"format": "pt"})
    import_hf(source, tmp_path / "ours", storage=None if joined else "float8_block")
    assert inspect(tmp_path / "ours").formats == {"float8" if joined else "float8_block": 8}
    assert not export_hf(tmp_path / "ours", tmp_path / "back").ignored
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written == json.loads((source / "config.json").read_text())
    dequantize(tmp_path / "ours", tmp_path / "values")
    assert verify(tmp_path / "values", reference).equal
