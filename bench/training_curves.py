"""Loss curves of a small model under every recipe, on real text: do they end where bf16 ends?

    python -m bench.training_curves [RECIPE ...]   some recipes only: prints, writes nothing

The model is SmolLM2's shape (deep and thin, three query heads per key head, tied embeddings) with about five million
parameters. Text, tokenizer and data order are the quickstart's: the standard library's source. Every run starts from
the same weights and reads the same batches, so the runs differ in the recipe only. Float32 parameters, bf16 compute,
layers compiled. Compared is the mean loss of the last steps; the bounds are in BOUNDS.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, versions, write_result
from bench.recipes import NAMES, named
from bench.steps import losses_of_steps
from te_models import GPTModel
from te_models.config import AttentionConfig, EmbeddingConfig, MLPConfig, ModelConfig
from te_models.layers import set_rounding_seed
from te_models.memory import return_freed_memory
from te_models.quickstart.text import library_files
from te_models.quickstart.tiny import VOCABULARY, train_tokenizer
from te_models.training import build_dataset
from te_models.training.config import ScheduleConfig
from te_models.training.data.dataset import TokenDataset
from te_models.training.data.windows import Windows
from te_models.training.log.curves import plot_gaps

BOUNDS = dict.fromkeys(NAMES, 0.02) | {"nvfp4": 0.04}
"""How far the final loss may be from bf16's, relative."""
STEPS, FINAL, BATCH, SEQUENCE, SEED, LR = 300, 20, 8, 128, 0, 1e-3
SCHEDULE = ScheduleConfig(kind="cosine", warmup_steps=20)
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=192,
    num_layers=12,
    max_position_embeddings=SEQUENCE,
    init_method_std=1 / math.sqrt(192),  # SmolLM2: 1 / sqrt(576)
    attention=AttentionConfig(num_attention_heads=3, num_query_groups=1),
    mlp=MLPConfig(ffn_hidden_size=512),
    embedding=EmbeddingConfig(share_embeddings_and_output_weights=True),
)


def make_data(folder: Path) -> TokenDataset:
    """Tokenize the quickstart's training files with the quickstart's tokenizer."""
    files, _ = library_files()
    train_tokenizer(files).save_pretrained(folder / "tokenizer")
    return build_dataset(folder / "tokens", files, str(folder / "tokenizer"))


def losses_of(name: str, windows: Windows) -> list[float]:
    """Train one model under a recipe ("bf16": none) and return the loss of each step."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model = GPTModel(CONFIG, params_dtype=torch.float32).train()
    set_rounding_seed(model, SEED)
    options: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "lr": LR, "schedule": SCHEDULE, "recipe": named(name)}
    losses: list[float] = []
    for step, loss in enumerate(losses_of_steps(model, windows, **options)):
        losses.append(loss)
        return_freed_memory()
        if (step + 1) % 50 == 0:
            print(f"  {name}: step {step + 1}, loss {statistics.fmean(losses[-FINAL:]):.4f}", flush=True)
    return losses


def compare(curves: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return the final loss of each run and its distance from bf16's, with the bound and whether it is met."""
    final = {name: statistics.fmean(losses[-FINAL:]) for name, losses in curves.items()}
    found: dict[str, dict[str, Any]] = {"bf16": {"loss": round(final["bf16"], 5)}}
    for name in curves.keys() - {"bf16"}:
        distance = final[name] / final["bf16"] - 1
        found[name] = {"loss": round(final[name], 5), "over_bf16": round(distance, 5), "bound": BOUNDS[name]}
        found[name]["met"] = abs(distance) <= BOUNDS[name]
    return {name: found[name] for name in curves}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[[], *BOUNDS], metavar="RECIPE", help=", ".join(BOUNDS))
    chosen = parser.parse_args().recipes or list(BOUNDS)
    torch.set_num_threads(1)
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        windows = Windows(make_data(Path(scratch)), SEQUENCE, "train", 0.0, SEED)
        begun = time.process_time()
        for name in ("bf16", *chosen):
            curves[name] = losses_of(name, windows)
    found = compare(curves)
    for name, values in found.items():
        print(f"{name}: {values}")
    if set(chosen) == set(BOUNDS):
        parameters = sum(p.numel() for p in GPTModel(CONFIG, device="meta").parameters())
        payload = {
            "versions": versions("torch"),
            "model": CONFIG.to_dict(),
            "parameters": parameters,
            "steps": STEPS,
            "tokens_per_step": BATCH * SEQUENCE,
            "final_is_mean_of": FINAL,
            "cpu_seconds": round(time.process_time() - begun),
            "final": found,
            "losses": {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()},
        }
        print(f"written to {write_result('training_curves', payload)}")
        title = f"{parameters / 1e6:.1f} M parameters, {BATCH * SEQUENCE} tokens a step"
        plot_gaps(curves, RESULTS / "training_curves.png", span=FINAL, title=title, reference="bf16")
    return 0 if all(values.get("met", True) for values in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
