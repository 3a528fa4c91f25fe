"""Quantized folders imported into a form other than their own: MXFP4 as NVFP4 where it is exact, the others anew."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models.checkpoints import CheckpointError, dequantize, export_hf, import_hf, inspect, verify
from te_models.checkpoints.formats.source import FORMS
from te_models.layers.quantizer import Quantizer
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.quantized_cases import CASES, CHANNEL, make

MXFP4 = ("mxfp4-gpt-oss", "mxfp4-pack-quantized")
SCALES = {
    "mxfp4-gpt-oss": "model.layers.1.mlp.experts.down_proj_scales",
    "mxfp4-pack-quantized": "model.layers.1.self_attn.k_proj.weight_scale",
}


def set_scales(folder: Path, name: str, first: int, *, zero: bool = False) -> None:
    """Make all scale bytes of a folder 118 to 122, and the first one of a tensor `first`.

    zero: the values of its block become zero."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for scales in (tensor for key, tensor in tensors.items() if key.endswith(("_scales", "weight_scale"))):
        scales.clamp_(118, 122)
    scales = tensors[name]
    scales[(0,) * scales.dim()] = first
    if zero and name.endswith("_scales"):
        tensors[name.replace("_scales", "_blocks")][(0,) * scales.dim()] = 0
    elif zero:
        tensors[name.replace("_scale", "_packed")][0, :16] = 0
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("case", MXFP4)
def test_mxfp4_is_exact_in_nvfp4(tmp_path: Path, case: str, layout: str) -> None:
    source, _ = make(CASES[case], tmp_path, torch.float32)
    set_scales(source, SCALES[case], 118 + 17)
    plan = import_hf(source, tmp_path / "ours", storage="nvfp4", layout=layout, max_shard_bytes=200_000)
    assert {x.kind for x in plan.report.lines.values()} == {"exact", "re-encoded exact"}
    assert set(inspect(tmp_path / "ours").formats) == {"nvfp4"}
    dequantize(tmp_path / "ours", tmp_path / "values")
    import_hf(source, tmp_path / "expected", dequantize=True, layout=layout)
    assert_same_bits(stored(tmp_path / "expected"), stored(tmp_path / "values"))
    export_hf(tmp_path / "ours", tmp_path / "hf", format="nvfp4-pack-quantized")
    import_hf(tmp_path / "hf", tmp_path / "hf-values", dequantize=True, layout=layout)
    assert_same_bits(stored(tmp_path / "expected"), stored(tmp_path / "hf-values"))


@pytest.mark.parametrize("case", MXFP4)
def test_scales_too_far_apart_are_refused_or_requantized_as_asked(tmp_path: Path, case: str) -> None:
    source, _ = make(CASES[case], tmp_path, torch.float32)
    set_scales(source, SCALES[case], 118 + 18)
    name = "linear_fc2" if case == "mxfp4-gpt-oss" else "linear_qkv"
    with pytest.raises(CheckpointError, match=rf"{name}.weight .* its scales span 2\^18, .* 2\^17; --allow-requantize"):
        import_hf(source, tmp_path / "new/ours", storage="nvfp4")
    assert not (tmp_path / "new").exists()
    plan = import_hf(source, tmp_path / "ours", storage="nvfp4", allow_requantize=True)
    lines = [x for x in plan.report.lines.values() if x.kind == "requantized" and "columnwise" not in x.target]
    assert [(x.count, x.target) for x in lines] == [(1, "nvfp4")] and lines[0].tensors.endswith(f"{name}.weight")
    assert lines[0].max_error
    copies = [x for x in plan.report.lines.values() if "columnwise" in x.target]
    assert copies and all(x.max_error for x in copies)


@pytest.mark.sentinels("mxfp4-gpt-oss-0", "mxfp4-pack-quantized-200")
@pytest.mark.parametrize("scale", [0, 200])
@pytest.mark.parametrize("case", MXFP4)
def test_blocks_of_zeros_may_have_any_scale(tmp_path: Path, case: str, scale: int) -> None:
    source, _ = make(CASES[case], tmp_path, torch.float32)
    set_scales(source, SCALES[case], scale, zero=True)
    plan = import_hf(source, tmp_path / "ours", storage="nvfp4")
    assert plan.report is not None and "requantized" not in str(plan.report)
    dequantize(tmp_path / "ours", tmp_path / "values")
    import_hf(source, tmp_path / "expected", dequantize=True)
    assert verify(tmp_path / "values", tmp_path / "expected").equal


@pytest.mark.sentinels("fp8-moe-float8", "mxfp4-gpt-oss-nvfp4", "channel-float8")
@pytest.mark.parametrize("storage", FORMS)
@pytest.mark.parametrize("case", ["fp8-moe", "modelopt-fp8", "modelopt-nvfp4", "mxfp4-gpt-oss", "channel"])
def test_every_format_in_every_form(tmp_path: Path, case: str, storage: str) -> None:
    """Without permission only what is exact; with it the numbers are those of quantizing the values."""
    source, _ = make(CASES.get(case, CHANNEL), tmp_path, torch.float32)
    try:
        import_hf(source, tmp_path / "ours", storage=storage)
    except CheckpointError as error:
        assert "--allow-requantize" in str(error)
    else:
        assert set(inspect(tmp_path / "ours").formats) == {storage}
        return
    assert not (tmp_path / "ours").exists()
    plan = import_hf(source, tmp_path / "ours", storage=storage, allow_requantize=True)
    assert set(inspect(tmp_path / "ours").formats) == {storage} and plan.report is not None
    assert all(x.max_error is not None for x in plan.report.lines.values() if x.kind == "requantized")
    import_hf(source, tmp_path / "values", dequantize=True)
    ours, values = stored(tmp_path / "ours"), stored(tmp_path / "values")
    for name, meta in plan.formats.items():
        fields = Quantizer.from_dict(dict(meta["quantizer"])).quantize_fields(values[name])
        assert torch.equal(ours[name].view(torch.uint8), fields["rowwise_data"].view(torch.uint8)), name

    export_hf(tmp_path / "ours", tmp_path / "hf", allow_requantize=True)


def test_unknown_forms_are_refused(tmp_path: Path) -> None:
    source, _ = make(CASES["mxfp4-gpt-oss"], tmp_path)
    for allowed in (False, True):
        with pytest.raises(
            CheckpointError, match=r"mxfp4 cannot be stored as 'int5'; allowed: mxfp8, nvfp4; with --allow"
        ):
            import_hf(source, tmp_path / "ours", storage="int5", allow_requantize=allowed)


def test_only_scales_that_are_no_powers_of_two_are_requantized_for_mxfp8(tmp_path: Path) -> None:
    source, _ = make(CASES["fp8-ue8m0"], tmp_path, torch.float32)
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"] *= 1.5
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not a power of two.* --allow-requantize quantizes it anew"):
        import_hf(source, tmp_path / "ours", storage="mxfp8")
    plan = import_hf(source, tmp_path / "ours", storage="mxfp8", allow_requantize=True)
    (line,) = [x for x in plan.report.lines.values() if x.kind == "requantized"]
    assert (line.tensors, line.count, line.target) == ("mlp.experts.linear_fc1.weight", 1, "mxfp8") and line.max_error
    assert set(inspect(tmp_path / "ours").formats) == {"mxfp8"}
