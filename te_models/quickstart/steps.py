"""The five steps of the quickstart, each a function of the run, and the comparisons that they check themselves with.

Models are loaded one after the other, never side by side, so that the largest one decides the memory.
"""

import gc
import math
import shutil
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from te_models.checkpoints import export_hf, import_hf, open_checkpoint, quantize, relayout, upcycle
from te_models.layers import recipe as recipe_by_name

from .. import GPTModel, generate
from ..compare_logits import agreement, load_theirs, relative_error
from ..memory import return_freed_memory
from ..sizes import plural
from ..training import TokenDataset, TrainConfig, Windows, read_metrics, train, write_dataset
from ..training.log.curves import plot_gaps
from .run import Run, steps_done
from .text import middle_windows


@torch.no_grad()
def logits(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [B, S, V] of `windows` [B, S], one window at a time."""
    return torch.cat([model(window[None]).logits.float() for window in windows])


def theirs(folder: Path, windows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits by transformers."""
    values = logits(load_theirs(folder, dtype), windows)
    return_freed_memory()
    return values


def ours(folder: Path, windows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits by te_models."""
    values = logits(GPTModel.from_pretrained(folder, dtype=dtype).eval(), windows)
    return_freed_memory()
    return values


def perplexity(logits_BSV: torch.Tensor, windows: torch.Tensor) -> float:
    """exp of the mean negative log likelihood of each next token."""
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).exp().item()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors files of a folder, as stored."""
    from te_models.checkpoints.io.store import read_tensors

    files = [read_tensors(file)[0] for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """How many names have different dtype, shape or bytes, or are in one only."""
    return sum(name not in a or name not in b or not same_bits(a[name], b[name]) for name in a.keys() | b.keys())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte agree (unlike ==, NaN equals itself and 0.0 is not -0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def file_bytes(folder: Path) -> int:
    """Bytes in the safetensors files of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def import_model(run: Run) -> torch.Tensor:
    """Import, and check logits in float32, perplexity in bfloat16, and the way back bit for bit.

    Returned are our float32 logits.
    """
    report, windows = run.report, run.windows
    import_hf(run.hf, run.model)

    reference, dense = theirs(run.hf, windows, torch.float32), ours(run.model, windows, torch.float32)
    report.at_most(
        "float32 logits against transformers, relative error",
        relative_error(dense, reference),
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
    return dense


def quantize_and_compare(run: Run) -> None:
    """Store the weights under each recipe; what is read back is what quantizing in memory gives, bit for bit."""
    report = run.report
    weights = GPTModel.from_pretrained(run.model, dtype=torch.bfloat16).state_dict()
    unquantized = report.numbers["perplexity"]
    for name in ("current", "block", "mxfp8"):
        folder = run.scratch / f"model-{name}"
        quantize(run.model, folder, name)
        with open_checkpoint(folder) as checkpoint:
            stored_quantized = list(checkpoint.formats)
        model = GPTModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
        read = model.state_dict()
        quantizer = recipe_by_name(name).weight_quantizer()
        wrong = sum(
            not same_bits(field, quantizer.quantize(weights[fqn]).fields[kind])
            for fqn in stored_quantized
            for kind, field in read[fqn].fields.items()
        )
        report.same(f"{name}: stored weights against quantizing in memory", wrong, len(stored_quantized), "matrices")
        value = perplexity(logits(model, run.windows), run.windows)
        del model, read
        return_freed_memory()
        report.numbers[f"perplexity_{name}"] = value
        report.numbers[f"size_ratio_{name}"] = file_bytes(folder) / file_bytes(run.model)
        change = abs(value / unquantized - 1)
        report.at_most(
            f"{name}: perplexity {value:.5g}, against bf16 weights ({unquantized:.5g}), relative", change, 0.05
        )
        shutil.rmtree(folder)


def experts(run: Run, dense: torch.Tensor) -> None:
    """Upcycle; then move the experts, plain and quantized, to the per-GEMM layout and back.

    dense: the float32 logits of the model that is upcycled.
    """
    report, sizes = run.report, run.sizes
    upcycle(run.model, run.moe, sizes.experts, sizes.topk)
    report.at_most(
        f"{plural(sizes.experts, 'expert')}, top {sizes.topk}: float32 logits against the dense model, relative error",
        relative_error(ours(run.moe, run.windows, torch.float32), dense),
        1e-5,
    )
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


def train_experts(run: Run) -> Path:
    """Train both; return the folder of the FP8 run's model."""
    report, sizes = run.report, run.sizes
    count, per_file = sizes.train_batches * sizes.train_batch, sizes.windows_per_file
    text = middle_windows(run.tokenizer, run.training_files, count // per_file, per_file * sizes.train_length)
    dataset = write_dataset(run.scratch / "tokens", [[text.flatten().tolist()]], run.vocab_size)
    with report.working(lambda: "measuring the untrained model"):
        before, untrained = _untrained(run, dataset)
    first = statistics.fmean(untrained[-sizes.compared :])
    report.numbers |= {"perplexity_before_training": before, "loss_before_training": untrained}
    curves = {name: run.out / f"train-{name}" for name in ("bf16", run.recipe)}
    last: dict[str, float] = {}
    for name, folder in curves.items():
        report.say(f"  training in {name}: {plural(sizes.train_batches, 'batch')}, each read {_times(sizes.epochs)}")
        with report.working(partial(_progress, name, folder, sizes.train_batches * sizes.epochs)):
            train(train_config(run, folder, "none" if name == "bf16" else name))
        _release()
        shutil.rmtree(folder / "checkpoints")  # gigabytes of optimizer state that nobody will continue from
        losses = [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]
        last[name] = statistics.fmean(losses[-sizes.compared :])
        report.numbers[f"loss_{name}"] = losses
        what = f"{name}: mean loss on the last {plural(sizes.compared, 'batch')}, from {first:.4g} without training"
        report.at_most(what, last[name], sizes.most_loss * first, 4)
        after = perplexity(ours(folder / "final", run.windows, torch.bfloat16), run.windows)
        report.numbers[f"perplexity_after_{name}"] = after
        report.at_most(f"{name}: perplexity on held-out text, from {before:.4g}", after, before, 4)
    losses = {"not trained": untrained, **{name: report.numbers[f"loss_{name}"] for name in curves}}
    tokens = sizes.train_batch * sizes.train_length
    title = f"{sizes.experts} experts, top {sizes.topk}, trained on {sizes.train_batches} batches of {tokens} tokens"
    plot_gaps(losses, run.out / "curves.png", span=sizes.compared, title=title, reference="bf16")
    gap = abs(last[run.recipe] / last["bf16"] - 1)
    report.at_most(f"loss of {run.recipe} against bf16 on the last batches, relative", gap, 0.05)
    return curves[run.recipe] / "final"


def _progress(name: str, folder: Path, steps: int) -> str:
    return f"training in {name}: {steps_done(folder)} of {steps}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@torch.no_grad()
def _untrained(run: Run, dataset: TokenDataset) -> tuple[float, list[float]]:
    """Return the perplexity that the model has before training, on held-out text, and its loss on the batch of each
    step: how much easier a batch is than another is no progress."""
    sizes, seed = run.sizes, train_config(run, run.out, "none").seed
    windows = Windows(dataset, sizes.train_length, "train", 0.0, seed)
    model = GPTModel.from_pretrained(run.moe, dtype=torch.bfloat16).eval()
    before, losses = perplexity(logits(model, run.windows), run.windows), []
    for step in range(sizes.epochs * sizes.train_batches):
        batch = windows.batch(step * sizes.train_batch, sizes.train_batch)
        losses.append(math.log(perplexity(model(batch).logits.float(), batch)))
    del model
    return_freed_memory()
    return before, losses


def _release() -> None:
    """Free the model that was trained: the compiler's caches would keep it alive beside the next one."""
    torch._dynamo.reset()
    gc.collect()
    return_freed_memory()


def train_config(run: Run, folder: Path, recipe: str) -> TrainConfig:
    """The configuration of one of the two runs; they differ in the recipe only."""
    sizes = run.sizes
    steps = sizes.train_batches * sizes.epochs
    return TrainConfig.from_dict(
        {
            "output_dir": str(folder),
            "steps": steps,
            "model": {"path": str(run.moe)},
            "data": {
                "path": str(run.scratch / "tokens"),
                "sequence_length": sizes.train_length,
                "micro_batch_size": sizes.train_batch,
                "validation_fraction": 0.0,
            },
            # Moments in bfloat16, rounded stochastically, are half of the memory that AdamW needs here.
            "optimizer": {"lr": sizes.learning_rate, "moment_dtype": "bfloat16"},
            "schedule": {"kind": "wsd", "warmup_steps": min(4, steps // 4), "decay_steps": steps // 3},
            "precision": {"dtype": "bf16", "recipe": recipe},
            # A few dozen steps do not earn back the minutes that a graph of thirty layers takes to compile.
            "compile": sizes.compile,
            "compile_mode": "block",
            "checkpoint": {"every_minutes": 0.0},  # nobody continues from one
            "log": {"progress": run.progress},
        }
    )


PROMPT = '''def read_lines(path):
    """Return the lines of a text file."""
'''


def export_and_compare(run: Run, trained: Path) -> None:
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
