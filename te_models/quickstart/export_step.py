"""Step 5: the trained mixture of experts as a Mixtral folder, run by transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from te_models.checkpoints import export_hf

from .. import GPTModel, generate
from ..agreement import load_theirs, relative_error
from .compare import logits
from .run import Run

PROMPT = '''def read_lines(path):
    """Return the lines of a text file."""
'''


def run(run: Run, trained: Path) -> None:
    """Export, load with transformers, compare logits and greedily generated text."""
    report, out = run.report, run.out / "hf-moe"
    export_hf(trained, out, family="mixtral")
    run.tokenizer.save_pretrained(out)
    prompt = run.tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids

    model = load_theirs(out, torch.float32)
    reference = logits(model, run.windows)
    mask = torch.ones_like(prompt)
    limit = run.sizes.new_tokens
    their_ids = model.generate(prompt, attention_mask=mask, max_new_tokens=limit, do_sample=False)  # pyright: ignore
    del model

    mine = GPTModel.from_pretrained(trained, dtype=torch.float32).eval()
    report.at_most(
        "float32 logits of the exported model against transformers, relative error",
        relative_error(logits(mine, run.windows), reference),
        1e-5,
    )
    our_ids = generate(mine, prompt, run.sizes.new_tokens, temperature=0.0, eos_token_id=run.tokenizer.eos_token_id)
    new = our_ids[0, prompt.shape[1] :].tolist()
    their_new = their_ids[0, prompt.shape[1] :].tolist()
    wrong = sum(a != b for a, b in zip(new, their_new)) + abs(len(new) - len(their_new))
    report.same("greedy text by te_models (KV cache) and by transformers", wrong, len(their_new), "tokens")
    text = run.tokenizer.decode(our_ids[0])
    report.numbers["generated"] = text
    report.say("\n".join("    | " + line for line in text.splitlines()))
