"""Adapters of models of every family, as peft puts them over transformers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from te_models import GPTModel
from te_models.checkpoints import CheckpointError
from te_models.lora import add_lora, export_adapter, load_adapter, lora_state_dict
from tests.checkpoints.families.test_text_part import make as make_with_images
from tests.checkpoints.family_cases import CASES, make
from tests.te_models.test_peft_adapters import pytestmark as WARNINGS

peft: Any = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = WARNINGS
IDS = torch.arange(12)[None] * 5 % 61
FIRST = [*{family: case for case, (family, _) in reversed(CASES.items())}.values()]
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
REFUSED = {
    **dict.fromkeys(MAMBA, ("mixer.linear_proj",)),
    "laguna": ("shared_experts.linear_fc1", "shared_experts.linear_fc2"),
    "dbrx": EXPERTS,
}
EVERYDAY = ("mamba2", "zamba2", "deepseek_v4", "llama4")


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(IDS).logits


def adapted(case: str, leaving_out: tuple[str, ...] = ()) -> GPTModel:
    """A model with adapters of all layers but these."""
    model = GPTModel.from_hf(make(case)).eval()
    add_lora(model, 3)
    names = [name.rpartition(".lora_")[0] for name in lora_state_dict(model) if name.endswith("lora_A.weight")]
    taken = [name for name in names if not name.endswith(leaving_out)]
    model = GPTModel.from_hf(make(case)).eval()
    add_lora(model, 3, targets=taken)
    generator = torch.Generator().manual_seed(1)
    for tensor in lora_state_dict(model).values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in EVERYDAY else [pytest.mark.slow]) for c in FIRST])
def test_peft_computes_what_we_do(case: str, tmp_path: Path) -> None:
    """With what we write, and so do we with what we read of it again: to 1e-5 of the largest logit."""
    model, again = adapted(case, REFUSED.get(CASES[case][0], ())), GPTModel.from_hf(make(case)).eval()
    export_adapter(model, tmp_path, base_model="org/name")
    load_adapter(again, tmp_path)
    before, ours = logits_of(make(case)), logits_of(model)
    scale = before.abs().max()
    assert (ours - before).abs().max() > 0.02 * scale
    for other in (peft.PeftModel.from_pretrained(make(case), tmp_path).eval(), again):
        assert (logits_of(other) - ours).abs().max() < 1e-5 * scale


@pytest.mark.sentinels("nemotron_h")
@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_cannot_have_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^decoder\..* in transformers' model, and peft has no adapters of \*"):
        export_adapter(adapted(case), tmp_path / "peft")
    if case in MAMBA:
        with pytest.raises(ValueError, match="Module 'out_proj' is incompatible with Mamba-based models"):
            peft.get_peft_model(make(case), peft.LoraConfig(r=2, target_modules=["out_proj"], task_type="CAUSAL_LM"))


def test_a_family_without_a_decoder_in_transformers_is_named(tmp_path: Path) -> None:
    model = GPTModel.from_hf(make_with_images("glm5_next"))
    add_lora(model, 2)
    with pytest.raises(CheckpointError, match=r"^this transformers has no class for the family 'glm5_next_text'$"):
        export_adapter(model, tmp_path)


def test_weights_that_layers_share_have_one_adapter(tmp_path: Path) -> None:
    """Each of their modules in transformers' model gets it; modules with adapters of their own cannot be read."""
    model, other = adapted("zamba2"), GPTModel.from_hf(make("zamba2")).eval()
    export_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    ours, theirs = lora_state_dict(model), lora_state_dict(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.4.shared_transformer.feed_forward.down_proj.lora_B.weight"
    without = {n: t for n, t in tensors.items() if not n.startswith(name.removesuffix("lora_B.weight"))}
    for wrong in (tensors | {name: tensors[name] + 1}, without):
        save_file(wrong, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"layers\.1\..*down_proj and model\.layers\.4\..* in different ways"):
            load_adapter(GPTModel.from_hf(make("zamba2")), tmp_path)
