"""Folders of every quantized format after training: what was not touched comes back byte for byte, with the scales of
activations that it was calibrated with; what was touched is values, and its scales are named as left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import export_hf, import_hf
from te_models.checkpoints.families import FAMILIES
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
    assert origin is not None
    namespace = FAMILIES[origin.family or ""].namespace(model.config, origin.form)
    weights = {link.stored for link in namespace.links if link.name == f"{TOUCHED}.weight"}
    modules = tuple(f"{weight.removesuffix('.weight')}." for weight in weights)
    touched = {name for name in before if name.startswith(modules)} - {m + "bias" for m in modules}
    assert weights <= after.keys() and all(after[name].dtype == torch.bfloat16 for name in weights)
    assert touched and before.keys() - touched == after.keys() - weights
    kept = before.keys() - touched
    choices = {name for name in kept if name.endswith(("e_score_correction_bias", "expert_bias"))}
    assert all(torch.equal(after[name], before[name].float()) for name in choices)  # which a model has in float32
    assert_same_bits(*({name: tensors[name] for name in kept - choices} for tensors in (before, after)))
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
