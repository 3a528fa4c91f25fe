"""How far is a recipe's loss from bf16's, over several seeds, and is it more than another order of sums makes?

    python -m bench.recipe_gap             trains what is missing of every model, variant and seed, then the result
    python -m bench.recipe_gap --result    the result of the seeds that are there already
    python -m bench.recipe_gap --models moe --recipes mxfp8     some only: prints, writes nothing
    python -m bench.recipe_gap --of moe20m                      a mixture of 20 M parameters, the first 50 steps

A dense model and a mixture of experts are trained under every recipe from the same weights on the same batches, once
per seed. The gap of a seed is loss / bf16's loss of that seed - 1, of the mean loss of the last steps of a span; its
95 % interval over seeds is Student's. Two variants are no recipes and bound what is noise: "fp32" multiplies in
float32, so that sums round elsewhere, and "perturbed" is bf16 from weights that differ by 1 part in 1,000. In a mixture
both also change which expert a token goes to, as a recipe does: a recipe whose gaps are not wider than theirs differs
from bf16 by noise. Each run is a file in a scratch folder, so an interrupted bench goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, versions, write_result
from bench.recipes import NAMES, named
from bench.steps import losses_of_steps
from te_models import GPTModel
from te_models.config import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.layers import set_rounding_seed
from te_models.quickstart.text import library_files
from te_models.training import build_dataset
from te_models.training.config import ScheduleConfig
from te_models.training.data.dataset import TokenDataset
from te_models.training.data.windows import Windows

NOISE = ("fp32", "perturbed")
"""Variants whose distance from bf16 is another order of sums, or another start 1 part in 1,000 away."""
VARIANTS = ("bf16", *NOISE, *NAMES)
LR = 2e-3
EARLY, FINAL = 10, 40
"""The gap at step 50 is of its last EARLY steps, the gap at the end of longer runs of the last FINAL steps."""
SCHEDULE = ScheduleConfig(kind="cosine", warmup_steps=20)
SCRATCH = Path(tempfile.gettempdir()) / "te_models_recipe_gap"
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t of a two-sided 95 % interval, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is trained: models by name, `batch` windows of `sequence` tokens a step. result: the JSON file's name."""

    result: str
    models: dict[str, ModelConfig]
    seeds: int
    steps: int
    batch: int
    sequence: int

    def ends(self, steps: int) -> dict[int, int]:
        """Return the steps at which gaps are taken, each with the number of steps that end there and are averaged."""
        return {50: EARLY} if steps == 50 else {50: EARLY, steps: FINAL}


def _model(hidden: int, heads: int, layers: int, sequence: int, expert_ffn: int = 0) -> ModelConfig:
    """Return a model of bytes whose MLPs have four times its width, or eight experts, of which a token uses two."""
    experts: dict[str, Any] = {"num_moe_experts": 8, "moe_router_topk": 2, "aux_loss_coeff": 0.01}
    return ModelConfig(
        vocab_size=257,
        hidden_size=hidden,
        num_layers=layers,
        max_position_embeddings=sequence,
        init_method_std=1 / math.sqrt(hidden),
        attention=AttentionConfig(num_attention_heads=heads),
        mlp=MLPConfig(ffn_hidden_size=4 * hidden),
        moe=MoEConfig(moe_ffn_hidden_size=expert_ffn, **experts) if expert_ffn else None,
    )


COMPARISONS = {
    "small": Comparison(
        result="recipe_gap",
        models={"dense": _model(64, 2, 2, 64), "moe": _model(64, 2, 2, 64, 128)},
        seeds=5,
        steps=1000,
        batch=2,
        sequence=64,
    ),
    "moe20m": Comparison(
        result="recipe_gap_moe20m",
        models={"moe": _model(256, 4, 6, 128, 512)},
        seeds=10,
        steps=50,
        batch=1,
        sequence=128,
    ),
}


class Bench:
    """The runs of one machine, each a file of its losses in a folder."""

    def __init__(self, folder: Path, of: Comparison, steps: int, seeds: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.of, self.steps, self.seeds = folder, of, steps, seeds
        self.tokens = folder / "tokens"

    def file(self, model: str, variant: str, seed: int) -> Path:
        of = self.of
        settings = json.dumps([of.models[model].to_dict(), of.batch, of.sequence, LR, SCHEDULE.to_dict()])
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]  # a run of other settings is another run
        return self.folder / f"{model}-{variant}-{seed}-{self.steps}-{digest}.json"

    def losses(self, model: str, variant: str, seed: int) -> list[float] | None:
        """Return the losses of a run, or None where it is missing."""
        file = self.file(model, variant, seed)
        return json.loads(file.read_text())["losses"] if file.is_file() else None

    def whole_seeds(self, models: Iterable[str], variants: Iterable[str]) -> list[int]:
        """Return the seeds of which every run is there."""
        pairs = [(model, variant) for model in models for variant in variants]
        return [seed for seed in range(self.seeds) if all(self.file(*pair, seed).is_file() for pair in pairs)]

    def run_missing(self, models: dict[str, ModelConfig], variants: tuple[str, ...]) -> None:
        """Train what is missing, seed by seed, so that an interrupted bench has whole seeds."""
        if not self.tokens.exists():
            build_dataset(self.tokens, library_files()[0], "bytes")
        dataset = TokenDataset.open(self.tokens)
        for seed in range(self.seeds):
            windows = Windows(dataset, self.of.sequence, "train", 0.0, seed)
            for name, config in models.items():
                for variant in variants:
                    if self.file(name, variant, seed).is_file():
                        continue
                    begun = time.process_time()
                    losses = losses_of(config, variant, windows, seed, self.steps, self.of.batch)
                    seconds = time.process_time() - begun
                    partial = self.folder / "partial"
                    partial.write_text(json.dumps({"losses": losses, "cpu_seconds": round(seconds, 1)}))
                    partial.rename(self.file(name, variant, seed))
                    print(f"{name} {variant} seed {seed}: {statistics.fmean(losses[-FINAL:]):.4f}, {seconds:.0f} s")
                    sys.stdout.flush()


def losses_of(config: ModelConfig, variant: str, windows: Windows, seed: int, steps: int, batch: int) -> list[float]:
    """Train a new model on windows and return the loss of each step."""
    torch.manual_seed(seed)
    model = GPTModel(config, params_dtype=torch.float32).train()
    if variant == "perturbed":
        for parameter in model.parameters():
            parameter.data *= 1 + 1e-3 * torch.randn_like(parameter)
    set_rounding_seed(model, seed)
    options: dict[str, Any] = {"steps": steps, "batch": batch, "lr": LR, "schedule": SCHEDULE}
    options["precision"] = "fp32" if variant == "fp32" else "bf16-mixed"
    options["recipe"] = named(variant) if variant in NAMES else None
    return [round(loss, 5) for loss in losses_of_steps(model, windows, **options)]


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of a value per seed, in percent, and the half width of its 95 % interval."""
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(100 * statistics.fmean(values), 3), "half_width": round(100 * half, 3)}


def gaps_of(losses: dict[str, list[list[float]]], end: int, span: int) -> dict[str, dict[str, Any]]:
    """Return how far each variant is from bf16 in steps `end - span + 1` to `end`. losses: of each variant, a list per
    seed. beyond_noise: the interval excludes 0, and the mean is above the largest distance that a variant of NOISE has
    with any seed."""
    means = {v: [statistics.fmean(run[end - span : end]) for run in runs] for v, runs in losses.items()}
    per_seed = {v: [a / b - 1 for a, b in zip(values, means["bf16"], strict=True)] for v, values in means.items()}
    noise = 100 * max(abs(gap) for v in NOISE for gap in per_seed[v])
    found: dict[str, dict[str, Any]] = {}
    for variant, values in per_seed.items():
        if variant == "bf16":
            continue
        found[variant] = interval(values) | {"per_seed": [round(100 * value, 3) for value in values]}
        mean, half = found[variant]["mean"], found[variant]["half_width"]
        if variant not in NOISE:
            found[variant]["beyond_noise"] = abs(mean) > half and abs(mean) > noise
    return found


def result_of(bench: Bench, models: dict[str, ModelConfig], variants: tuple[str, ...]) -> dict[str, Any]:
    """Return the gaps of each model at step 50 and at the end, over the seeds that are whole."""
    seeds = bench.whole_seeds(models, variants)
    found: dict[str, Any] = {"seeds": seeds, "gap_to_bf16_percent": {}}
    for model in models:
        losses = {v: [bench.losses(model, v, seed) or [] for seed in seeds] for v in variants}
        ends = bench.of.ends(bench.steps)
        found["gap_to_bf16_percent"][model] = {f"step {end}": gaps_of(losses, end, ends[end]) for end in ends}
        found.setdefault("bf16_loss", {})[model] = [round(statistics.fmean(run[-FINAL:]), 4) for run in losses["bf16"]]
    return found


def draw(found: dict[str, Any], out: Path) -> None:
    """Draw the gap of each variant with its interval, and the seeds as points: a row per model, a column per step."""
    from matplotlib.figure import Figure

    gaps = found["gap_to_bf16_percent"]
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = figure.subplots(len(gaps), len(next(iter(gaps.values()))), squeeze=False)
    for row, (model, ends) in zip(panels, gaps.items(), strict=True):
        for axes, (end, variants) in zip(row, ends.items(), strict=True):
            for i, (variant, gap) in enumerate(variants.items()):
                color = "gray" if variant in NOISE else f"C{i - len(NOISE)}"
                axes.errorbar(i, gap["mean"], gap["half_width"], fmt="o", capsize=4, color=color)
                axes.scatter([i + 0.25] * len(gap["per_seed"]), gap["per_seed"], s=8, color=color, alpha=0.6)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(variants)), list(variants), rotation=30)
            axes.set_title(f"{model}, {end}")
            axes.set_ylabel("loss from bf16 (%)")
            axes.grid(alpha=0.3)
    figure.savefig(out, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=COMPARISONS, default="small", help="which models (small)")
    parser.add_argument("--seeds", type=int, help="seeds of each run, 2 to 10 (5; moe20m: 10)")
    parser.add_argument("--steps", type=int, help="steps of each run, at least 50 (1000; moe20m: 50)")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help=f"folder of finished runs ({SCRATCH})")
    parser.add_argument("--models", nargs="+", choices=("dense", "moe"), help="some models only")
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), help="some recipes only")
    parser.add_argument("--result", action="store_true", help="train nothing")
    options = parser.parse_args()
    of = COMPARISONS[options.of]
    seeds, steps = options.seeds or of.seeds, options.steps or of.steps
    if seeds not in T_95 or steps < 50:
        parser.error(f"seeds are {seeds} and steps {steps}; allowed: 2 to 10, and at least 50")
    torch.set_num_threads(1)
    bench = Bench(options.scratch, of, steps, seeds)
    models = {name: config for name, config in of.models.items() if name in (options.models or of.models)}
    variants = ("bf16", *NOISE, *options.recipes)
    if not options.result:
        bench.run_missing(models, variants)
    if len(bench.whole_seeds(models, variants)) < 2:
        print("fewer than two seeds have all their runs: no result", file=sys.stderr)
        return 1
    found = result_of(bench, models, variants)
    for model, ends in found["gap_to_bf16_percent"].items():
        for end, gaps in ends.items():
            for variant, gap in gaps.items():
                print(f"{model}, {end}, {variant}: {gap['mean']:+.2f} +- {gap['half_width']:.2f} %")
    if {*models} != {*of.models} or {*variants} != {*VARIANTS}:
        return 0
    runs = [bench.file(model, variant, seed) for model in models for variant in variants for seed in found["seeds"]]
    seconds = sum(json.loads(file.read_text())["cpu_seconds"] for file in runs)
    payload = {
        "versions": versions("torch"),
        "models": {name: config.to_dict() for name, config in of.models.items()},
        "parameters": {
            name: sum(p.numel() for p in GPTModel(config, device="meta").parameters())
            for name, config in of.models.items()
        },
        "steps": bench.steps,
        "tokens_per_step": of.batch * of.sequence,
        "mean_of_steps": {f"step {end}": span for end, span in of.ends(bench.steps).items()},
        "cpu_seconds": round(seconds),
    }
    print(f"written to {write_result(of.result, payload | found)}")
    draw(found, RESULTS / f"{of.result}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
