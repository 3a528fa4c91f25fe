"""The trained SmolLM2-135M: perplexity and text stay what they are, whatever way the weights took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the model is compared with transformers")
import transformers

from te_models import GPTModel
from te_models.agreement import compare_logits
from te_models.checkpoints import export_hf, import_hf, relayout, upcycle
from te_models.hf import TEModelForCausalLM
from te_models.quickstart.compare import perplexity
from te_models.quickstart.smollm import smollm_folder

pytestmark = [pytest.mark.real, pytest.mark.slow]
TEXT = "The first thing that the compiler does with a function is to read it, line by line, and to note what it calls. "


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm_folder()


@pytest.fixture(scope="module")
def windows(folder: Path) -> torch.Tensor:
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT * 8)["input_ids"]
    return torch.tensor(ids[:128]).view(2, 64)


@torch.no_grad()
def perplexity_of(model: torch.nn.Module, windows: torch.Tensor) -> float:
    return perplexity(model(windows).logits.float(), windows)


def test_perplexity_is_equal_after_every_round_trip(folder: Path, windows: torch.Tensor, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = perplexity_of(theirs, windows)
    memory = GPTModel.from_hf(theirs)
    assert perplexity_of(memory.eval(), windows) == pytest.approx(before, rel=1e-5)
    assert perplexity_of(memory.to_hf(), windows) == before
    del theirs, memory
    import_hf(folder, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    GPTModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "saved-back")
    for name in ("back", "saved-back"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert perplexity_of(model, windows) == before, name
    upcycle(tmp_path / "ours", tmp_path / "moe", 2, 2)
    relayout(tmp_path / "moe", tmp_path / "per-gemm", "per-gemm")
    export_hf(tmp_path / "per-gemm", tmp_path / "mixtral")
    for name in ("ours", "moe", "per-gemm"):
        ours = GPTModel.from_pretrained(tmp_path / name).eval()
        assert perplexity_of(ours, windows) == pytest.approx(before, rel=1e-5), name
    mixtral = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral", dtype=torch.float32)
    assert perplexity_of(mixtral, windows) == pytest.approx(before, rel=1e-5)


def test_generate_and_layers_are_those_of_transformers(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = tokenizer(["def main():", TEXT], return_tensors="pt", padding=True, padding_side="left")
    texts = []
    for kind in (transformers.AutoModelForCausalLM, TEModelForCausalLM):
        model = kind.from_pretrained(folder, dtype=torch.float32)
        texts.append(tokenizer.batch_decode(model.generate(**prompts, max_new_tokens=24, do_sample=False)))
    assert texts[0] == texts[1]
    report = compare_logits(folder, folder, tokens=128, text=TEXT * 8)
    assert report.agree and report.first_divergence is None and report.argmax_agreement == 1.0
