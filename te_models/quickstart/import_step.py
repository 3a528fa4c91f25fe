"""Step 1: import the Hugging Face folder; compare with transformers; export it back."""

from __future__ import annotations

import torch

from te_models.checkpoints import export_hf, import_hf

from ..agreement import agreement, relative_error
from .compare import differing, ours, perplexity, stored, theirs
from .run import Run


def run(run: Run) -> None:
    """Import, and check logits in float32, perplexity in bfloat16, and the way back bit for bit."""
    report, windows = run.report, run.windows
    import_hf(run.hf, run.model)

    reference = theirs(run.hf, windows, torch.float32)
    report.at_most(
        "float32 logits against transformers, relative error",
        relative_error(ours(run.model, windows, torch.float32), reference),
        1e-5,
    )
    reference = theirs(run.hf, windows, torch.bfloat16)
    value = ours(run.model, windows, torch.bfloat16)
    mine, other = perplexity(value, windows), perplexity(reference, windows)
    report.numbers |= {
        "perplexity": mine,
        "perplexity_transformers": other,
        "bf16_top1_agreement": agreement(value, reference),
    }
    report.at_most("perplexity on held-out standard library source", mine, run.sizes.most_perplexity, digits=4)
    report.at_most(f"perplexity against transformers ({other:.4g}), relative", abs(mine / other - 1), 0.01)

    back = run.scratch / "back"
    export_hf(run.model, back)
    source = stored(run.hf)
    report.same("import and export again", differing(source, stored(back)), len(source), "tensors")
