"""The trained SmolLM2-135M: perplexity and text stay what they are, whatever way the weights took."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the model is compared with transformers")
import transformers

from te_models import GPTModel
from te_models.checkpoints import dequantize, export_hf, import_hf, quantize, relayout, reshard, upcycle
from te_models.compare_logits import compare_logits
from te_models.hf import TEModelForCausalLM
from te_models.quickstart.smollm import smollm_folder
from te_models.quickstart.steps import perplexity
from tests.checkpoints.hf_cases import assert_same_bits, stored

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
    reshard(folder, tmp_path / "resharded", max_shard_bytes=40_000_000)
    assert len(list((tmp_path / "resharded").glob("*.safetensors"))) > 5
    for name in ("back", "saved-back", "resharded"):
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


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        ("current", "modelopt-fp8"),
        ("current", "float-quantized"),
        ("mxfp8", "mxfp8"),
        ("mxfp8", "mxfp8-quantized"),
        ("nvfp4", "modelopt-nvfp4"),
        ("nvfp4", "nvfp4-pack-quantized"),
    ],
)
def test_perplexity_is_equal_after_every_quantized_round_trip(
    folder: Path, windows: torch.Tensor, tmp_path: Path, recipe: str, form: str
) -> None:
    """Quantized once, the model is the same number for number in every format, and transformers reads its values."""
    import_hf(folder, tmp_path / "ours")
    plain = perplexity_of(GPTModel.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval(), windows)
    quantize(tmp_path / "ours", tmp_path / "quantized", recipe)
    before = perplexity_of(GPTModel.from_pretrained(tmp_path / "quantized").eval(), windows)
    assert before != plain and before == pytest.approx(plain, rel=0.05 if recipe != "nvfp4" else 1.0)
    export_hf(tmp_path / "quantized", tmp_path / "hf", format=form)
    reshard(tmp_path / "hf", tmp_path / "resharded", max_shard_bytes=20_000_000)
    import_hf(tmp_path / "resharded", tmp_path / "again")
    first, again = stored(tmp_path / "quantized"), stored(tmp_path / "again")
    for name in [name for name in again if name.endswith("_amax")]:  # files have its 2688th part, or 2688 by it
        torch.testing.assert_close(again.pop(name), first.pop(name), rtol=2.0**-22, atol=0)
    assert_same_bits({name: first[name] for name in again}, again)
    assert all("_columnwise" in name for name in first.keys() - again.keys()), "files of both have no such copies"
    for name in ("hf", "again"):
        after = perplexity_of(GPTModel.from_pretrained(tmp_path / name).eval(), windows)
        assert after == (pytest.approx(before, rel=1e-5) if recipe == "nvfp4" else before), name
    dequantize(tmp_path / "again", tmp_path / "values", dtype="float32")
    export_hf(tmp_path / "values", tmp_path / "values-hf")
    values = perplexity_of(GPTModel.from_pretrained(tmp_path / "values").eval(), windows)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "values-hf", dtype=torch.float32)
    assert perplexity_of(theirs, windows) == pytest.approx(values, rel=1e-5)


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
