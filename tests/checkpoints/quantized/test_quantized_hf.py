"""Every quantized format of Hugging Face files: import, values, logits, the way back, against float64 decoders."""

import importlib
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import (
    check_manifest,
    dequantize,
    export_hf,
    import_hf,
    inspect,
    quantize,
    relayout,
    reshard,
    toy,
    verify,
)
from te_models.layers.quantizer import Quantizer
from tests.checkpoints.hf_cases import assert_same_bits, refused, stored, there_and_back, transformers
from tests.checkpoints.quantized_cases import CASES, CHANNEL, MODELOPT_CHANNEL, logits, make, modelopt

quantizer_finegrained_fp8 = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")

ROUNDED = tuple(case for case in CASES if case.startswith(("modelopt-nvfp4", "nvfp4-pack-quantized", "modelopt-mixed")))
"""Values are products of three numbers in them, which float32 rounds twice."""


def assert_values(folder: Path, reference: Path, case: str) -> None:
    """Compare our folder with the reference's values: equal, or within two roundings of float32."""
    import_hf(reference, folder.parent / f"{folder.name}-reference")
    found, expected = stored(folder), stored(folder.parent / f"{folder.name}-reference")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).abs()
        assert (error <= (2.0**-22 * value.double().abs() if case in ROUNDED else 0)).all(), name


@pytest.mark.sentinels(
    "fp8-moe",
    "fp8-per-tensor",
    "mxfp4-gpt-oss",
    "modelopt-nvfp4-latent",
    "nvfp4-pack-quantized",
    "mxfp8-quantized",
    "pack-quantized-int8-zeros",
    "gptq",
)
@pytest.mark.parametrize("case", CASES)
def test_import_and_export_restore_every_byte(tmp_path: Path, case: str) -> None:
    source, reference = make(CASES[case], tmp_path, torch.float32)
    plan = import_hf(source, tmp_path / "ours")
    assert {line.kind for line in plan.report.lines.values()} <= {"exact", "re-encoded exact", "re-encoded"}
    rounded = [line for line in plan.report.lines.values() if line.kind == "re-encoded"]
    assert bool(rounded) == (case.startswith(("modelopt-nvfp4", "modelopt-mixed")) and "stacks" not in case) and all(
        0 < (line.max_error or 0) < 2.0**-22 for line in rounded
    )
    assert verify(source, tmp_path / "ours").equal
    relayout(tmp_path / "ours", tmp_path / "split", "per-gemm")
    back = export_hf(tmp_path / "split", tmp_path / "back")
    assert back.report is not None and "exact" in str(back.report)
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).exists():
            assert json.loads((source / name).read_text()) == json.loads((tmp_path / "back" / name).read_text())
        else:
            assert not (tmp_path / "back" / name).exists()
    for folder in ("ours", "split", "back"):
        check_manifest(tmp_path / folder)
    dequantize(tmp_path / "ours", tmp_path / "values")
    assert_values(tmp_path / "values", reference, case)


@pytest.mark.sentinels(
    "fp8-dense",
    "mxfp4-gpt-oss",
    "modelopt-nvfp4",
    "mxfp8-quantized",
    "float-quantized-tensor",
    "channel",
    "modelopt-channel",
)
@pytest.mark.parametrize("case", [*CASES, "channel", "modelopt-channel"])
def test_dequantized_weights_are_the_reference_s(tmp_path: Path, case: str) -> None:
    cases = CASES | {"channel": CHANNEL, "modelopt-channel": MODELOPT_CHANNEL}
    source, reference = make(cases[case], tmp_path, torch.float32)
    import_hf(source, tmp_path / "values", dequantize=True)
    assert_values(tmp_path / "values", reference, case)
    export_hf(tmp_path / "values", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert not (tmp_path / "plain/hf_quant_config.json").exists()
    assert stored(tmp_path / "plain").keys() == stored(reference).keys()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp8-dense", "modelopt-nvfp4", "channel"])
def test_values_are_rounded_once(tmp_path: Path, case: str) -> None:
    """To the dtype that is asked for, not to that of the other weights before."""
    source, _ = make(CASES.get(case, CHANNEL), tmp_path)
    _, reference = make(CASES.get(case, CHANNEL), tmp_path / "float32", torch.float32)
    import_hf(source, tmp_path / "found", dequantize=True, dtype="float32")
    import_hf(reference, tmp_path / "expected")
    found, expected = stored(tmp_path / "found"), stored(tmp_path / "expected")
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    error = (found[name].double() - expected[name].double()).abs()
    assert (error <= 2.0**-22 * expected[name].double().abs()).all()
    export_hf(tmp_path / "found", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float32"
    import_hf(source, tmp_path / "half", dequantize=True, dtype="float16")
    assert torch.equal(stored(tmp_path / "half")[name], found[name].half())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp8-moe", "mxfp4-gpt-oss", "modelopt-nvfp4", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_values_is_loaded_on_request(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """The values that an import stores, rounded once; also of a format that our storage does not take over."""
    source, _ = make(CASES.get(case, CHANNEL), tmp_path)
    import_hf(source, tmp_path / "values", dequantize=True, dtype=dtype)
    expected = dict(GPTModel.from_pretrained(tmp_path / "values", dtype=dtype).stored_tensors())
    folders = [source]
    if case != "channel":
        import_hf(source, tmp_path / "ours")
        folders.append(tmp_path / "ours")
    for folder in folders:
        model = GPTModel.from_pretrained(folder, dtype=dtype, dequantize=True)
        found = dict(model.stored_tensors())
        if "nvfp4" in case and folder != source:  # ours has amaxes, of whose factors some are rounded
            torch.testing.assert_close(found, expected, rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-22, atol=0)
        else:
            assert_same_bits(found, expected)
        model.save_pretrained(tmp_path / f"{folder.name}-again")
        export_hf(tmp_path / f"{folder.name}-again", tmp_path / f"{folder.name}-plain")
        assert "quantization_config" not in json.loads((tmp_path / f"{folder.name}-plain/config.json").read_text())


@pytest.mark.sentinels("mxfp4-gpt-oss", "modelopt-fp8", "fp8-latent")
@pytest.mark.parametrize(
    "case", ["mxfp4-gpt-oss", "modelopt-nvfp4", "modelopt-fp8", "mxfp8-quantized", "fp8-dense", "fp8-moe", "fp8-latent"]
)
def test_logits_are_those_of_transformers_on_the_decoded_weights(tmp_path: Path, case: str) -> None:
    source, reference = make(CASES[case], tmp_path, torch.float32)
    import_hf(source, tmp_path / "ours")
    expected = logits(reference)
    for folder in (source, tmp_path / "ours"):
        model = GPTModel.from_pretrained(folder, device="cpu")
        with torch.no_grad():
            found = model(torch.arange(20)[None] % 61).logits.float()
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("case", ["fp8-dense", "fp8-moe", "mxfp4-gpt-oss"])
def test_transformers_reads_what_the_export_writes(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own decoders, on CPU. (deepseek_v3 is left out: transformers 5.17 spreads the scales of a ragged last block
    of rows over all rows, so it reads 192 rows as two blocks of 96.)"""
    # the check is for spreading a model over devices, which dequantizing on one does not do
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *args: True)
    source, reference = make(CASES[case], tmp_path)
    there_and_back(source, tmp_path)
    options = (transformers.Mxfp4Config if "mxfp4" in case else transformers.FineGrainedFP8Config)(dequantize=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with warnings.catch_warnings(action="ignore"):
        found = load(tmp_path / "back", dtype=torch.bfloat16, quantization_config=options)
        expected = load(reference, dtype=torch.bfloat16)
    assert_same_bits(found.state_dict(), expected.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mxfp4-gpt-oss", "modelopt-nvfp4"])
def test_columnwise_copies_come_from_the_values(tmp_path: Path, case: str) -> None:
    source, _ = make(CASES[case], tmp_path)
    plan = import_hf(source, tmp_path / "ours", allow_requantize=True)
    plain = import_hf(source, tmp_path / "plain")
    import_hf(source, tmp_path / "values", dequantize=True)
    ours, values, rowwise = stored(tmp_path / "ours"), stored(tmp_path / "values"), stored(tmp_path / "plain")
    copies = [line for line in plan.report.lines.values() if line.target.endswith("columnwise copy")]
    assert copies and all(line.kind == "requantized" and line.max_error for line in copies)
    for name, meta in plan.formats.items():
        fields = Quantizer.from_dict(dict(meta["quantizer"])).quantize_fields(values[name])
        for part in ("data", "scale_inv"):
            suffix = "" if part == "data" else f"_{part}"
            assert torch.equal(
                ours[f"{name}_columnwise{suffix}"].view(torch.uint8), fields[f"columnwise_{part}"].view(torch.uint8)
            )
            assert torch.equal(ours[name + suffix].view(torch.uint8), rowwise[name + suffix].view(torch.uint8))
        assert not Quantizer.from_dict(dict(plain.formats[name]["quantizer"])).columnwise
    model = GPTModel.from_pretrained(tmp_path / "ours", device="cpu")
    loss = model(torch.arange(20)[None] % 61, labels=torch.arange(20)[None] % 61).loss
    loss.backward()
    assert torch.isfinite(loss)
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(source), stored(tmp_path / "back"))


def test_a_scale_per_row_has_no_exact_form_but_may_be_requantized(tmp_path: Path) -> None:
    source, _ = make(CHANNEL, tmp_path)
    with pytest.raises(ValueError, match=r"no form of ours has such scales .*--allow-requantize .*--dequantize"):
        import_hf(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    plan = import_hf(source, tmp_path / "ours", allow_requantize=True)
    requantized = [line for line in plan.report.lines.values() if line.kind == "requantized"]
    assert len(requantized) == 4 and all(line.max_error for line in requantized)
    assert inspect(tmp_path / "ours").formats == {"float8": 8}


@pytest.mark.sentinels("fp8-moe", "mxfp8-quantized")
@pytest.mark.parametrize("case", ["fp8-moe", "modelopt-fp8", "modelopt-nvfp4", "mxfp8-quantized"])
def test_fused_experts_are_quantized_like_single_ones(tmp_path: Path, case: str) -> None:
    source, _ = make(CASES[case], tmp_path)
    import_hf(source, tmp_path / "ours")
    plan = export_hf(tmp_path / "ours", tmp_path / "fused", form="fused")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    fused, single = stored(tmp_path / "fused"), stored(source)
    for g, part in enumerate(("gate_proj", "up_proj")):
        rows = single[f"model.layers.0.mlp.experts.2.{part}.weight"]
        assert torch.equal(
            fused[name][2, g * len(rows) : (g + 1) * len(rows)].view(torch.uint8), rows.view(torch.uint8)
        )
    assert not plan.ignored and (f"{name}_input_scale" in fused) == case.startswith("modelopt")
    import_hf(tmp_path / "fused", tmp_path / "again")
    report = verify(tmp_path / "ours", tmp_path / "again")
    assert report.equal, str(report)
    export_hf(tmp_path / "again", tmp_path / "back", form="published")
    assert_same_bits(single, stored(tmp_path / "back"))


@pytest.mark.sentinels("float-quantized-block", "nvfp4-pack-quantized")
@pytest.mark.parametrize(
    "case", [case for case, known in CASES.items() if "quantized" in case and known.model != "deepseek_v3"]
)
def test_scales_of_the_key_value_cache_come_back(tmp_path: Path, case: str) -> None:
    """compressed-tensors has them beside the projections of attention, not beside a weight."""
    source, _ = make(CASES[case], tmp_path)
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor([0.3]),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.7]).bfloat16(),
        "model.layers.1.self_attn.q_scale": torch.tensor([[[0.25]], [[1.5]]]),
    }
    file = source / "model.safetensors"
    save_file({**stored(source), **scales}, file, metadata={"format": "pt"})
    assert import_hf(source, tmp_path / "ours").ignored == ()
    assert export_hf(tmp_path / "ours", tmp_path / "back").ignored == ()
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    if case == "float-quantized-tensor":
        assert set(import_hf(source, tmp_path / "values", dequantize=True).ignored) >= set(scales)
    for name in ("model.layers.0.k_scale", "model.layers.0.mlp.k_scale", "model.layers.2.self_attn.k_scale"):
        save_file({**stored(source), name: torch.ones(1)}, file, metadata={"format": "pt"})
        with refused(f"not part of this model: '{name}'", tmp_path):
            import_hf(source, tmp_path / "x")
        save_file({n: t for n, t in stored(source).items() if n != name}, file, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["modelopt-fp8", "modelopt-nvfp4", "modelopt-nvfp4-latent"])
@pytest.mark.parametrize("attention", [False, True])
def test_modelopt_s_scales_of_the_cache_come_back(tmp_path: Path, case: str, attention: bool) -> None:
    """They have names of projections, which need not be quantized, nor be there in latent attention."""
    known = CASES[case]
    source, _ = make(replace(known, chosen=lambda n: known.chosen(n) and (attention or ".mlp." in n)), tmp_path)
    scales = {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(i + 0.3) for i in (0, 1) for x in "kv"}
    save_file({**stored(source), **scales}, source / "model.safetensors", metadata={"format": "pt"})
    assert import_hf(source, tmp_path / "ours").ignored == ()
    assert export_hf(tmp_path / "ours", tmp_path / "back").ignored == ()
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    toy(source, tmp_path / "toy", layers=1)
    kept = {n for n in stored(tmp_path / "toy") if n.endswith(("k_scale", "v_scale"))}
    assert kept == {n for n in scales if ".0." in n}


def test_a_declaration_inside_of_config_json_may_be_the_whole_file(tmp_path: Path) -> None:
    nested = {"quant_method": "modelopt", **modelopt("NVFP4", group_size=16)}
    source, _ = make(replace(CASES["modelopt-nvfp4"], config=nested, separate=None), tmp_path)
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))
    assert json.loads((tmp_path / "back/config.json").read_text())["quantization_config"] == nested


def test_weights_alone_in_nvfp4_are_taken_over(tmp_path: Path) -> None:
    """ModelOpt has a name of its own for them."""
    source, _ = make(replace(CASES["modelopt-nvfp4"], separate=modelopt("W4A16_NVFP4", group_size=16)), tmp_path)
    tensors = {n: t for n, t in stored(source).items() if not n.endswith("input_scale")}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(stored(there_and_back(source, tmp_path)), tensors)
    assert (
        json.loads((tmp_path / "back/hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "W4A16_NVFP4"
    )


def test_resharding_keeps_the_declaration(tmp_path: Path) -> None:
    source, _ = make(CASES["modelopt-nvfp4"], tmp_path)
    reshard(source, tmp_path / "many", max_shard_bytes=200_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert (tmp_path / "many/hf_quant_config.json").read_bytes() == (source / "hf_quant_config.json").read_bytes()
    assert verify(source, tmp_path / "many").equal


@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
def test_every_conversion_reports_each_class_once(tmp_path: Path, layout: str) -> None:
    _, reference = make(CASES["fp8-moe"], tmp_path)
    plans = {
        "ours": import_hf(reference, tmp_path / "ours", layout=layout),
        "q": quantize(tmp_path / "ours", tmp_path / "q", "block"),
        "values": dequantize(tmp_path / "q", tmp_path / "values", dtype="float32"),
        "relayout": relayout(tmp_path / "q", tmp_path / "relayout", "grouped"),
        "plain": export_hf(tmp_path / "values", tmp_path / "plain", dtype="bfloat16"),
    }
    kinds = {
        "ours": {"exact"},
        "q": {"exact", "quantized"},
        "values": {"converted", "dequantized"},
        "relayout": {"exact"},
        "plain": {"converted"},
    }
    for folder, plan in plans.items():
        lines = plan.report.to_dict()
        assert {line["kind"] for line in lines} == kinds[folder]
        assert len({line["tensors"] for line in lines}) == len(lines)
        assert not any(re.search(r"\d", re.sub("_fc[12]", "", line["tensors"])) for line in lines)
        assert json.loads((tmp_path / folder / "conversion.json").read_text())["classes"] == lines
    assert sum(line.count for line in plans["plain"].report.lines.values()) == len(stored(tmp_path / "plain"))
