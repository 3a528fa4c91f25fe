"""Steps 2 and 3: quantize and re-lay weights without losing a bit; a mixture of experts that starts as the model."""

from __future__ import annotations

import shutil

import torch

from te_models.checkpoints import open_checkpoint, quantize, relayout, upcycle
from te_models.layers import recipe as recipe_by_name

from .. import GPTModel
from ..agreement import relative_error
from .compare import differing, file_bytes, ours, perplexity, same_bits, stored
from .run import Run


def quantized(run: Run) -> None:
    """Store the weights under each recipe; what is read back is what quantizing in memory gives, bit for bit."""
    report = run.report
    weights = GPTModel.from_pretrained(run.model, dtype=torch.bfloat16).state_dict()
    plain = perplexity(ours(run.model, run.windows, torch.bfloat16), run.windows)
    for name in ("current", "block", "mxfp8"):
        folder = run.scratch / f"model-{name}"
        quantize(run.model, folder, name)
        with open_checkpoint(folder) as checkpoint:
            stored_quantized = list(checkpoint.formats)
        read = GPTModel.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        quantizer = recipe_by_name(name).weight_quantizer()
        wrong = sum(
            not same_bits(field, quantizer.quantize(weights[fqn]).fields[kind])
            for fqn in stored_quantized
            for kind, field in read[fqn].fields.items()
        )
        report.same(f"{name}: stored weights against quantizing in memory", wrong, len(stored_quantized), "matrices")
        del read
        value = perplexity(ours(folder, run.windows, torch.bfloat16), run.windows)
        report.numbers[f"perplexity_{name}"] = value
        report.numbers[f"size_ratio_{name}"] = file_bytes(folder) / file_bytes(run.model)
        change = abs(value / plain - 1)
        report.at_most(f"{name}: perplexity {value:.5g}, against bf16 weights ({plain:.5g}), relative", change, 0.05)
        shutil.rmtree(folder)


def experts(run: Run) -> None:
    """Upcycle; then move the experts, plain and quantized, to the per-GEMM layout and back."""
    report, sizes = run.report, run.sizes
    upcycle(run.model, run.moe, sizes.experts, sizes.topk)
    dense = ours(run.model, run.windows, torch.float32)
    report.at_most(
        f"{sizes.experts} experts, top {sizes.topk}: float32 logits against the dense model, relative error",
        relative_error(ours(run.moe, run.windows, torch.float32), dense),
        1e-5,
    )
    del dense
    quantize(run.moe, run.scratch / "moe-fp8", run.recipe)
    for what, source in (("bf16 experts", run.moe), (f"{run.recipe} experts", run.scratch / "moe-fp8")):
        there, back = run.scratch / "per-gemm", run.scratch / "grouped"
        relayout(source, there, "per-gemm")
        relayout(there, back, "grouped")
        before, after = stored(source), stored(back)
        moved = len(stored(there).keys() - before.keys())
        report.same(
            f"{what}: grouped to per-GEMM ({moved} tensors) and back", differing(before, after), len(before), "tensors"
        )
        for folder in (there, back):
            shutil.rmtree(folder)
    shutil.rmtree(run.scratch / "moe-fp8")
