"""What do the optimizers cost, and what do they reach on a small model?

    python -m bench.optimizers             three seeds of each, then the cost of a step
    python -m bench.optimizers --cost      the cost alone: prints, writes nothing

The cost is the processor time of an optimizer's step over AdamW's, and of a training step that notes attention logits
for QK-clip over one that does not; sides take turns. Curves are validation losses of runs from the same weights on the
same batches, each optimizer at one rate; "muon_joined" is Muon that takes q,
k and v, and gate and up, for one matrix.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bench.common import interleave, ratio, versions, write_result
from bench.small_runs import MODEL, SEEDS, small_run, summary, validation_curve
from te_models import GPTModel
from te_models.training import EvaluationConfig, OptimizerConfig, PrecisionConfig, ScheduleConfig
from te_models.training.build import build_optimizer
from te_models.training.optimizer.qk_clip import QKClip
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.step import make_loss_function

STEPS, EVERY = 100, 20
MEASURED = EvaluationConfig(every=EVERY, batches=4)
CONSTANT = ScheduleConfig(kind="constant", warmup_steps=20)
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": OptimizerConfig(lr=3e-3)},
    "muon": {"optimizer": OptimizerConfig(kind="muon", lr=3e-3)},
    "muon_joined": {"optimizer": OptimizerConfig(kind="muon", lr=3e-3, muon_split="none")},
    "schedule_free": {"optimizer": OptimizerConfig(kind="schedule_free", lr=1e-2), "schedule": CONSTANT},
}


def costs() -> dict[str, Any]:
    """Return what a step of each optimizer, and of noting logits, takes over AdamW's, and over one without."""
    config = MODEL.replace(hidden_size=512, num_layers=2)
    sides = {}
    for name, changes in VARIANTS.items():
        torch.manual_seed(0)
        model = GPTModel(config, dtype=torch.float32)
        optimizer = build_optimizer(small_run("cost", 0, **changes), model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        sides[name] = lambda optimizer=optimizer: optimizer.step(1e-3)
    samples = interleave(sides, rounds=9)
    found: dict[str, Any] = {
        name: samples[name].summary() | {"over_adamw": ratio(samples[name].cpu, samples["adamw"].cpu)} for name in sides
    }
    passes = {}
    for name in ("plain", "noted"):
        torch.manual_seed(0)
        model = GPTModel(config.replace(max_position_embeddings=512), dtype=torch.float32).train()
        if name == "noted":
            QKClip(model, 100.0, Ranks(), Ranks())
        loss_of = make_loss_function(model, PrecisionConfig(dtype="bf16-mixed"), "cpu", compiled=False)
        ids = torch.randint(0, MODEL.vocab_size, (2, 512))
        passes[name] = lambda loss_of=loss_of, ids=ids: loss_of(ids)[0].backward()
    samples = interleave(passes, rounds=9)
    return found | {"passes_with_noted_logits": ratio(samples["noted"].cpu, samples["plain"].cpu)}


def main() -> None:
    """Train what is missing, measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="the cost of a step alone")
    torch.set_num_threads(1)
    alone = parser.parse_args().cost
    curves: dict[str, list[list[float]]] = {}
    for name, changes in VARIANTS.items() if not alone else ():
        runs = [small_run(f"optimizers-{name}", seed, steps=STEPS, evaluation=MEASURED, **changes) for seed in SEEDS]
        curves[name] = [validation_curve(run) for run in runs]
    cost = costs()
    for name, its in cost.items():
        print(name, its)
    if alone:
        return
    final = {name: [curve[-1] for curve in its] for name, its in curves.items()}
    gaps = [a - b for a, b in zip(final["muon_joined"], final["muon"], strict=True)]
    payload = {"versions": versions("torch"), "steps": STEPS, "cost": cost}
    payload |= {"final": {name: summary(its) for name, its in final.items()}, "joined_minus_split": summary(gaps)}
    for name, its in payload["final"].items():
        print(f"{name:14} {its}")
    payload["validation_steps"] = list(range(EVERY, STEPS + 1, EVERY))
    payload["curves"] = {name: [[round(x, 4) for x in curve] for curve in its] for name, its in curves.items()}
    print(f"wrote {write_result('optimizers', payload)}")


if __name__ == "__main__":
    main()
