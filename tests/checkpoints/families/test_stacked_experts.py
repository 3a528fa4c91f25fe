"""Experts that ModelOpt stores as they lie in the model, [E, in, out], written from weights with other scales."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, export_hf, import_hf, quantize
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.quantized_cases import CASES, decode_fp8, make

STACK = "model.layers.0.feed_forward.experts.gate_up_proj"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A Llama 4 of ours, quantized with a scale for each expert."""
    (tmp_path / "case").mkdir()
    _, reference = make(CASES["modelopt-fp8-stacks"], tmp_path / "case")
    tensors = stored(reference)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor[0] *= 0.3
    save_file(tensors, reference / "model.safetensors", metadata={"format": "pt"})
    import_hf(reference, tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "ours", "current")
    return tmp_path / "ours"


def test_scales_that_differ_are_refused(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"linear_fc1.weight .* its experts have scales of their own, .* one for all"
    ):
        export_hf(ours, tmp_path / "hf", format="modelopt-fp8")
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_quantized_anew_they_have_one(ours: Path, tmp_path: Path) -> None:
    plan = export_hf(ours, tmp_path / "hf", format="modelopt-fp8", allow_requantize=True)
    found = stored(tmp_path / "hf")
    scale, data = found[f"{STACK}_weight_scale"], found[STACK]
    assert scale.shape == () and data.dtype == torch.float8_e4m3fn and f"{STACK}_scale" not in found
    export_hf(ours, tmp_path / "values", dequantize=True)
    expected = stored(tmp_path / "values")[STACK]
    assert data.shape == expected.shape
    error = (decode_fp8(data) * scale.double() - expected.double()).abs()
    assert (error <= 2.0**-3.9 * expected.double().abs() + scale.double() * 2.0**-9).all()
    assert plan.report is not None and "requantized" in str(plan.report)
    import_hf(tmp_path / "hf", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), found)


def test_formats_without_a_number_per_matrix_take_any(ours: Path, tmp_path: Path) -> None:
    quantize(tmp_path / "plain", tmp_path / "mxfp8", "mxfp8")
    export_hf(tmp_path / "mxfp8", tmp_path / "hf", format="modelopt-mxfp8")
    found = stored(tmp_path / "hf")
    assert found[f"{STACK}_weight_scale"].shape == (3, 256 // 32, 2 * 96) and found[STACK].shape == (3, 256, 2 * 96)
    export_hf(tmp_path / "mxfp8", tmp_path / "values", dequantize=True)
    import_hf(tmp_path / "hf", tmp_path / "read", dequantize=True)
    export_hf(tmp_path / "read", tmp_path / "read-values")
    assert torch.equal(stored(tmp_path / "read-values")[STACK], stored(tmp_path / "values")[STACK])
