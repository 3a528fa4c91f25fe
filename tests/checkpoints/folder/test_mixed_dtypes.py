"""Files in which some tensors have another dtype than the rest: every tensor keeps its own, unless it is joined."""

import fnmatch
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, diff, export_hf, import_hf, quantize, relayout, verify
from te_models.layers import QuantizedTensor, recipe
from tests.checkpoints import quantized_cases
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back

FLOAT32 = {
    "router": ("*.mlp.gate.weight",),
    "norms": ("*norm.weight",),
    "head": ("lm_head.weight",),
    "layer": ("model.layers.1.*",),
    "experts": ("*.experts.*",),
    "several": ("*.mlp.gate.weight", "*norm.weight", "lm_head.weight", "model.embed_tokens.weight"),
}
"""What else has float32 in a checkpoint in bfloat16."""


def mixed(folder: Path, patterns: tuple[str, ...]) -> Path:
    """Save a mixture in bfloat16 in which some tensors hold numbers that need float32."""
    with warnings.catch_warnings(action="ignore"):
        make("qwen3_moe", dtype=torch.bfloat16).save_pretrained(folder)
    widen(folder, patterns)
    return folder


def widen(folder: Path, patterns: tuple[str, ...]) -> None:
    tensors = {name: tensor.clone() for name, tensor in stored(folder).items()}
    wide = [name for name in tensors if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    assert wide
    for name in wide:
        tensors[name] = tensors[name].float() * (1 + 2.0**-20)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.sentinels("experts", "several")
@pytest.mark.parametrize("which", FLOAT32)
@torch.no_grad()
def test_every_tensor_keeps_its_dtype(tmp_path: Path, which: str) -> None:
    source = mixed(tmp_path / "hf", FLOAT32[which])
    import_hf(source, tmp_path / "ours")
    assert {tensor.dtype for tensor in stored(tmp_path / "ours").values()} == {torch.bfloat16, torch.float32}
    relayout(tmp_path / "ours", tmp_path / "per-gemm", "per-gemm")
    for folder in ("ours", "per-gemm"):
        assert verify(source, tmp_path / folder).equal
        export_hf(tmp_path / folder, tmp_path / f"{folder}-back")
        assert_same_bits(stored(tmp_path / f"{folder}-back"), stored(source))
        config = json.loads((tmp_path / f"{folder}-back/config.json").read_text())
        assert config == json.loads((source / "config.json").read_text())
    # A model has one dtype; float32 holds every number, whichever folder they come from.
    a, b = (GPTModel.from_pretrained(folder, dtype=torch.float32) for folder in (source, tmp_path / "per-gemm"))
    for (name, x), (_, y) in zip(a.stored_tensors(), b.stored_tensors(), strict=True):
        assert torch.equal(x, y), name
    a.save_pretrained(tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "saved-back")
    for name, tensor in stored(source).items():
        assert torch.equal(stored(tmp_path / "saved-back")[name], tensor.float()), name


def test_quantizing_keeps_the_dtype_of_the_others(tmp_path: Path) -> None:
    source = mixed(tmp_path / "hf", FLOAT32["several"])
    quantize(source, tmp_path / "fp8", "current")
    export_hf(tmp_path / "fp8", tmp_path / "back")
    again = stored(tmp_path / "back")
    for name, tensor in stored(source).items():
        if not name.endswith("_proj.weight"):
            assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


@pytest.mark.parametrize("case", ["fp8-moe", "mxfp4-gpt-oss"])
def test_a_quantized_folder_has_plain_tensors_of_several_dtypes(tmp_path: Path, case: str) -> None:
    source, _ = quantized_cases.make(quantized_cases.CASES[case], tmp_path)
    widen(source, ("*norm.weight", "*.mlp.gate.weight", "*.mlp.router.weight"))
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "parameter"),
    [("*.1.self_attn.k_proj.weight", "self_attention.linear_qkv"), ("*.experts.2.*", "experts.linear_fc1")],
)
def test_tensors_of_one_parameter_must_have_the_same(tmp_path: Path, pattern: str, parameter: str) -> None:
    source = mixed(tmp_path / "hf", (pattern,))
    with pytest.raises(CheckpointError, match=rf"{parameter}.weight would be joined from different dtypes, .*F32"):
        import_hf(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="would be joined from different dtypes"):
        quantize(source, tmp_path / "fp8", "current")
    import_hf(source, tmp_path / "ours", dtype="float32")
    a, b = (GPTModel.from_pretrained(folder, recipe=recipe("current")) for folder in (source, tmp_path / "ours"))
    for (name, x), (_, y) in zip(a.stored_tensors(), b.stored_tensors(), strict=True):
        assert torch.equal(dequantized(x), dequantized(y)), name
    assert {tensor.dtype for tensor in stored(tmp_path / "ours").values()} == {torch.float32}
    export_hf(tmp_path / "ours", tmp_path / "back")
    for name, tensor in stored(source).items():
        assert torch.equal(stored(tmp_path / "back")[name], tensor.float()), name


def replace(folder: Path, source: Path, name: str, tensor: torch.Tensor) -> Path:
    shutil.copytree(source, folder)
    save_file({**stored(source), name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_parts_of_a_parameter_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    """Not rounded to the dtype of the others: a number that needs float32, and the same one rounded, both differ."""
    name = "model.layers.1.self_attn.k_proj.weight"
    source = mixed(tmp_path / "hf", ("*.1.self_attn.k_proj.weight",))
    wide = stored(source)[name]
    other = replace(tmp_path / "other", source, name, wide * (1 + 2.0**-20))
    report = verify(source, other)
    assert not report.equal and len(report.differences) == 1 and "1.self_attention.linear_qkv" in report.differences[0]
    assert [t.name for t in diff(source, other).tensors] == ["decoder.layers.1.self_attention.linear_qkv.weight"]
    exact = replace(tmp_path / "exact", source, name, wide.bfloat16().float())
    rounded = replace(tmp_path / "rounded", source, name, wide.bfloat16())
    (difference,) = verify(exact, rounded).differences
    assert difference.endswith(f"{name} in F32 and {name} in BF16")
    found = diff(exact, rounded)
    assert not found.equal and not found.tensors and "bfloat16 with float32 and bfloat16" in found.notes[0]
    assert verify(source, source).equal and diff(source, source).equal
