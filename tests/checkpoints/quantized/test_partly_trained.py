"""Folders of every quantized format after training: what was not touched comes back byte for byte, with the scales of
activations that it was calibrated with; what was touched is values, and its scales are named as left out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import export_hf, import_hf
from te_models.checkpoints.families import FAMILIES
from te_models.layers import FusedAdamW
from te_models.lora import add_lora, merge_lora
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.quantized_cases import CASES, make

TOUCHED = "decoder.layers.1.self_attention.linear_proj"


@pytest.mark.sentinels(
    "pack-quantized-int4-zeros", "gptq", "mixed-precision-quantized", "modelopt-fp8", "modelopt-mixed-hy-v3"
)
@pytest.mark.parametrize("case", CASES)
def test_what_training_left_alone_comes_back_byte_for_byte(tmp_path: Path, case: str) -> None:
    """LoRA over a stored base; the adapter of one layer is merged, and all other tensors have the bytes they had."""
    source, _ = make(CASES[case], tmp_path)
    import_hf(source, tmp_path / "ours")
    model = GPTModel.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    add_lora(model, rank=2, targets=[TOUCHED])
    tokens = torch.arange(20)[None] % 61
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    model(tokens, labels=tokens).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)
    merge_lora(model)
    model.save_pretrained(tmp_path / "trained")
    plan = export_hf(tmp_path / "trained", tmp_path / "back")
    before, after = stored(source), stored(tmp_path / "back")
    origin = model.origin
    namespace = FAMILIES[origin.family or ""].namespace(model.config, origin.form)
    weights = {link.stored for link in namespace.links if link.name == f"{TOUCHED}.weight"}
    modules = tuple(f"{weight.removesuffix('.weight')}." for weight in weights)
    touched = {name for name in before if name.startswith(modules)} - {m + "bias" for m in modules}
    assert weights <= after.keys() and all(after[name].dtype == torch.bfloat16 for name in weights)
    assert touched and before.keys() - touched == after.keys() - weights
    kept = before.keys() - touched
    assert_same_bits(*({name: tensors[name] for name in kept} for tensors in (before, after)))
    scales = {name for name in touched if name.endswith(("input_scale", "activation_scale", "input_global_scale"))}
    assert scales <= set(plan.ignored)
    declared = [path.read_text() for path in (tmp_path / "back").glob("*config.json")]
    if touched != weights:
        assert any(modules[0].removesuffix(".") in text.replace("\\", "") for text in declared)
    import_hf(tmp_path / "back", tmp_path / "again")  # the declaration is true
    if case.startswith("modelopt-mixed-hy"):
        both = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
        separate = json.loads((tmp_path / "back/hf_quant_config.json").read_text())["quantization"]
        assert both["quantized_layers"] == separate["quantized_layers"]
        assert modules[0].removesuffix(".") not in both["quantized_layers"]


CALIBRATED = [c for c in CASES if ("modelopt" in c or "nvfp4" in c) and "mxfp8" not in c and "pb-wo" not in c]
INPUTS = ("input_scale", "activation_scale", "input_global_scale")


@pytest.mark.sentinels("modelopt-fp8")
@pytest.mark.parametrize("case", CALIBRATED)
def test_scales_of_activations_do_not_outlive_the_weights_they_were_measured_with(tmp_path: Path, case: str) -> None:
    """A weight that is trained while it is stored quantized has other numbers; a folder that was only saved again has
    the same, with every scale."""
    source, _ = make(CASES[case], tmp_path)
    before = stored(source)
    assert any(name.endswith(INPUTS) for name in before)
    import_hf(source, tmp_path / "ours")
    for folder in (source, tmp_path / "ours"):
        model = GPTModel.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "saved")
        export_hf(tmp_path / "saved", tmp_path / "back")
        assert_same_bits(before, stored(tmp_path / "back"))
        weight = model.get_parameter(f"{TOUCHED}.weight")
        weight.requires_grad_()
        weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
        FusedAdamW([weight], lr=0.1).step()
        model.save_pretrained(tmp_path / "trained")
        plan = export_hf(tmp_path / "trained", tmp_path / "changed")
        assert f"measured with other values of '{TOUCHED}.weight', and are to be calibrated again" in " ".join(
            plan.notes
        )
        after = stored(tmp_path / "changed")
        assert not any(name.endswith(INPUTS) for name in after), "a declaration says of all weights or of none"
        assert {name for name in before if name.endswith(INPUTS)} <= set(plan.ignored)
        import_hf(tmp_path / "changed", tmp_path / "again")  # the declaration is true
        for name in ("saved", "back", "trained", "changed", "again"):
            shutil.rmtree(tmp_path / name)
    model.pretrained_folder = None
    model.save_pretrained(tmp_path / "trained")
    plan = export_hf(tmp_path / "trained", tmp_path / "changed")
    assert "measured with weights that nothing shows to be these" in " ".join(plan.notes)


@pytest.mark.parametrize("moved", [0.0, 1 + 2.0**-12])
def test_biases_that_choose_experts_come_back_in_the_dtype_of_the_folder(tmp_path: Path, moved: float) -> None:
    """bfloat16 where training left them alone; float32, and a note, where bfloat16 would round what it made of them."""
    source, _ = make(CASES["modelopt-mixed-hy-v3"], tmp_path)
    tensors = {n: t.bfloat16() if t.dtype == torch.float32 and t.dim() == 1 else t for n, t in stored(source).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    import_hf(source, tmp_path / "ours")
    biases = {name for name in tensors if name.endswith("expert_bias")}
    assert biases and all(tensors[name].dtype == torch.bfloat16 for name in biases)
    model = GPTModel.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            bias.add_(moved)
    for name in ("first", "trained"):  # what is recorded travels from folder to folder
        model.save_pretrained(tmp_path / name)
        model = GPTModel.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        model.pretrained_folder = None
    plan = export_hf(tmp_path / "trained", tmp_path / "back")
    after = stored(tmp_path / "back")
    if moved:
        assert all(torch.equal(after[name], tensors[name].float() + moved) for name in biases)
        assert any("stay float32: BF16 would round what training made of them" in note for note in plan.notes)
    else:
        assert_same_bits(*({name: its[name] for name in biases} for its in (tensors, after)))
        assert not any("stay float32" in note for note in plan.notes)
