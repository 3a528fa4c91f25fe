"""The train step (forward, backward, AdamW) against transformers', and our FP8 recipes' against our bf16 one.

Both libraries load the same weights from one folder and train on the same batch with the same fused AdamW, in bf16
with SDPA. Nothing is timed unless their losses agree, before and after three steps. transformers is run eagerly and
compiled (with fullgraph where it can), its experts in each implementation that it offers on a CPU; the ratio is
against its best.

    python -m bench.train_step [peers] [recipes]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import te_models
from bench.common import Samples, fastest, interleave, ratio, versions, write_result
from bench.shapes import DENSE, MOE, RECIPES, Shape
from te_models.training.config import OptimizerConfig, PrecisionConfig
from te_models.training.optimizer import Optimizer
from te_models.training.step import make_loss_function

Step = Callable[[], torch.Tensor]
# Relative. A bf16 logit is exact to 2^-9 and the mean over tokens averages that; two updates, and tokens that rounding
# sends to another expert, move the runs apart a little more.
TOLERANCES = (1e-3, 1e-2, 1e-2)
PEERS_DENSE = (("compiled", None), ("eager", None))
# Compiled with its loop over experts it recompiles until it gives up: 1.6x slower than with grouped_mm [measured].
PEERS_MOE = (("compiled", "grouped_mm"), ("eager", "grouped_mm"), ("eager", "eager"))


def our_step(folder: Path, input_ids: torch.Tensor, *, compiled: bool, recipe: str = "none") -> Step:
    """Return a function that trains our model one step and returns the loss."""
    model = te_models.GPTModel.from_pretrained(folder, dtype=torch.bfloat16).train()
    precision = PrecisionConfig.from_dict({"dtype": "bf16", "recipe": recipe})
    loss_function = make_loss_function(model, precision, "cpu", compiled=compiled)
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _ = loss_function(input_ids)
        loss.backward()
        optimizer.step(1e-4)
        return loss.detach()

    return step


def peer_step(folder: Path, input_ids: torch.Tensor, *, compiled: bool, experts: str | None) -> Step:
    """Return a function that trains transformers' model one step and returns the loss."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {} if experts is None else {"experts_implementation": experts}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", **options
    ).train()

    def loss_function(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    function = torch.compile(loss_function) if compiled else loss_function
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = function(input_ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def check_losses(sides: dict[str, Step]) -> dict[str, list[float]]:
    """Run three steps of every side; exit if their losses do not agree."""
    losses = {name: [round(float(step()), 5) for _ in range(3)] for name, step in sides.items()}
    first = next(iter(losses.values()))
    for name, values in losses.items():
        if not all(abs(a / b - 1) < limit for a, b, limit in zip(values, first, TOLERANCES, strict=True)):
            sys.exit(f"refusing to time: the losses of {name} are {values}, not {first}")
    return losses


def against_peers(shape: Shape, rounds: int) -> dict[str, Any]:
    """Compare with transformers on one shape."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape.write_random_model(folder)
        ids = shape.input_ids()
        sides = {
            f"te_models {kind}": our_step(folder, ids, compiled=kind == "compiled") for kind in ("compiled", "eager")
        }
        for kind, experts in PEERS_MOE if shape.experts else PEERS_DENSE:
            name = f"transformers {kind}" + (f", experts {experts}" if experts else "")
            sides[name] = peer_step(folder, ids, compiled=kind == "compiled", experts=experts)
        losses = check_losses(sides)
        samples = interleave(sides, rounds=rounds, warmup=1)
    ours = fastest(samples, [name for name in sides if name.startswith("te_models")])
    peer = fastest(samples, [name for name in sides if name.startswith("transformers")])
    return {
        "shape": shape.to_dict(),
        "losses": losses,
        "step": summaries(samples),
        "best": {"te_models": ours, "transformers": peer},
        "speed_of_best_over_best": speeds(samples, ours, peer),
        "speed_eager_over_eager": speeds(
            samples, "te_models eager", fastest(samples, [n for n in sides if n.startswith("transformers eager")])
        ),
    }


def against_bf16(shape: Shape, rounds: int) -> dict[str, Any]:
    """Compare our compiled step under each FP8 recipe with our compiled bf16 step on one shape."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape.write_random_model(folder)
        ids = shape.input_ids()
        names = {"bf16": "none", "current": "current", "block": "block", "mxfp8": "mxfp8"}
        sides = {name: our_step(folder, ids, compiled=True, recipe=recipe) for name, recipe in names.items()}
        losses = {name: [round(float(step()), 5) for _ in range(3)] for name, step in sides.items()}
        for name, values in losses.items():  # FP8 is not bf16: only that it trains alike
            if not max(abs(a / b - 1) for a, b in zip(values, losses["bf16"], strict=True)) < 0.02:
                sys.exit(f"refusing to time: the losses of {name} are {values}, not near {losses['bf16']}")
        samples = interleave(sides, rounds=rounds, warmup=1)
    return {
        "shape": shape.to_dict(),
        "losses": losses,
        "step": summaries(samples),
        "time_over_bf16": {name: ratio(samples[name].cpu, samples["bf16"].cpu) for name in sides if name != "bf16"},
    }


def summaries(samples: dict[str, Samples]) -> dict[str, dict[str, float]]:
    return {name: s.summary() for name, s in samples.items()}


def speeds(samples: dict[str, Samples], ours: str, peer: str) -> dict[str, dict[str, float]]:
    """Return how many times faster ours is: the peer's time over our time, CPU and wall."""
    a, b = samples[peer], samples[ours]
    return {"cpu": ratio(a.cpu, b.cpu), "wall": ratio(a.wall, b.wall)}


def peers(rounds: int = 9) -> None:
    """Measure all shapes against transformers, print and write the result."""
    cases = []
    for shape in (*DENSE, *MOE):
        case = against_peers(shape, rounds)
        cases.append(case)
        speed = case["speed_of_best_over_best"]["cpu"]
        print(
            f"{shape.name}: {speed['median']}x of {case['best']['transformers']} ({speed['min']} to {speed['max']})",
            flush=True,
        )
    packages = versions("torch", "transformers")
    write_result("train_step", {"versions": packages, "dtype": "bfloat16", "rounds": rounds, "cases": cases})


def recipes(rounds: int = 9) -> None:
    """Measure all shapes under each recipe, print and write the result."""
    cases = []
    for shape in RECIPES:
        case = against_bf16(shape, rounds)
        cases.append(case)
        times = ", ".join(
            f"{name} {t['median']}x ({t['min']} to {t['max']})" for name, t in case["time_over_bf16"].items()
        )
        print(f"{shape.name}: time over bf16: {times}", flush=True)
    write_result("recipe_step", {"versions": versions("torch"), "dtype": "bfloat16", "rounds": rounds, "cases": cases})


def main(parts: list[str]) -> None:
    """Run the named parts, all without a name."""
    torch.set_num_threads(1)
    known = {"peers": peers, "recipes": recipes}
    for part in parts or list(known):
        if part not in known:
            sys.exit(f"unknown part {part!r}; allowed: {', '.join(known)}")
        known[part]()


if __name__ == "__main__":
    main(sys.argv[1:])
