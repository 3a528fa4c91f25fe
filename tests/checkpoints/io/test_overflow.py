"""float16 does not reach as far as bfloat16: a conversion that would make infinities is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, dequantize, export_hf, import_hf, quantize
from tests.checkpoints import quantized_cases
from tests.checkpoints.hf_cases import stored

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)


def change(folder: Path, name: str, value: float) -> Path:
    tensors = {n: t.clone() for n, t in stored(folder).items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [999424.0, -65536.0])
def test_a_number_beyond_float16_is_refused(llama: Path, tmp_path: Path, name: str, value: float) -> None:
    source = change(llama, name, value)
    before = set(tmp_path.rglob("*"))
    message = rf"{name} has the value {value:.6g}, which float16 cannot hold \(at most 65504\); choose bfloat16"
    with pytest.raises(CheckpointError, match=message):
        import_hf(source, tmp_path / "ours", dtype="float16")
    assert set(tmp_path.rglob("*")) == before
    import_hf(source, tmp_path / "ours")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"has the value .*, which float16 cannot hold"):
        export_hf(tmp_path / "ours", tmp_path / "back", dtype="float16")
    assert set(tmp_path.rglob("*")) == before
    export_hf(tmp_path / "ours", tmp_path / "back", dtype="float32")


def test_what_float16_holds_and_infinities_pass(llama: Path, tmp_path: Path) -> None:
    source = change(llama, NAMES[0], float("inf"))
    change(source, NAMES[1], 65280.0)
    import_hf(source, tmp_path / "ours", dtype="float16")
    export_hf(tmp_path / "ours", tmp_path / "back")
    found = stored(tmp_path / "back")
    assert found[NAMES[0]].dtype == torch.float16 and found[NAMES[0]].isinf().sum() == 1
    assert found[NAMES[1]].view(-1)[-1] == 65280


def test_values_of_quantized_weights_beyond_float16_are_refused(llama: Path, tmp_path: Path) -> None:
    import_hf(change(llama, NAMES[2], 1e6), tmp_path / "ours")
    quantize(tmp_path / "ours", tmp_path / "fp8", "current")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight has values that float16 cannot hold"):
        dequantize(tmp_path / "fp8", tmp_path / "x", dtype="float16")
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight has the value .*, which float16 cannot hold"):
        export_hf(tmp_path / "fp8", tmp_path / "x", dequantize=True, dtype="float16")
    source, _ = quantized_cases.make(quantized_cases.CASES["fp8-dense"], tmp_path / "hf")
    name = "model.layers.0.mlp.up_proj.weight"
    change(source, f"{name}_scale_inv", 1e5)
    with pytest.raises(CheckpointError, match=rf"{name} has the value .*, which float16 cannot hold"):
        import_hf(source, tmp_path / "x", dequantize=True, dtype="float16")
    assert {path for path in tmp_path.rglob("*") if "hf" not in path.parts} == before
