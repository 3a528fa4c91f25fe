"""The train step (forward, backward, AdamW) against transformers'.

Both libraries load the same weights from one folder and train on the same batch with the same AdamW (torch's fused
one), in bf16 with SDPA. Nothing is timed unless their losses agree, before and after three steps. transformers is run
eagerly and compiled (with fullgraph where it can), its experts in each implementation that it offers on a CPU; the
ratio is against its best. Compiled in float32, with twice the memory of weights, it stands beside as another peer.

    python -m bench.train_step [--shapes NAME ...] [--rounds N] [--float32-peer]

--float32-peer leaves out transformers in bf16, whose step takes seconds where the CPU has no bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.common import Samples, fastest, interleave, ratio, versions, write_result
from bench.shapes import DENSE, MOE, Shape
from bench.steps import Step, our_step, torch_adamw

# Relative. A bf16 logit is exact to 2^-9 and the mean over tokens averages that; two updates, and tokens that rounding
# sends to another expert, move the runs apart a little more.
TOLERANCES = (1e-3, 1e-2, 1e-2)
IN_FLOAT32 = "transformers in float32"
PEERS_DENSE = (("compiled", None), ("eager", None))
# Compiled with its loop over experts it recompiles until it gives up: 1.6x slower than with grouped_mm [measured].
PEERS_MOE = (("compiled", "grouped_mm"), ("eager", "grouped_mm"), ("eager", "eager"))


def peer_step(
    folder: Path,
    input_ids: torch.Tensor,
    *,
    compiled: bool,
    experts: str | None,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """Return a function that trains transformers' model one step and returns the loss."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {} if experts is None else {"experts_implementation": experts}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", **options
    ).train()

    def loss_function(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    function = torch.compile(loss_function) if compiled else loss_function
    if compiled:
        with warnings.catch_warnings():
            # two cached version checks of transformers' experts, which Dynamo reports while it traces
            known = r"Dynamo detected a call to a `functools\.lru_cache`-wrapped function at 'moe\.py:\d+'"
            warnings.filterwarnings("ignore", known, UserWarning)
            function(input_ids)
    optimizer = torch_adamw(model)

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


def against_peers(shape: Shape, rounds: int, *, float32_peer: bool) -> dict[str, Any]:
    """Compare with transformers on one shape."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape.write_random_model(folder)
        ids = shape.input_ids()
        sides = {
            f"te_models {kind}": our_step(folder, ids, compiled=kind == "compiled", with_torch_adamw=True)
            for kind in ("compiled", "eager")
        }
        peers = PEERS_MOE if shape.experts else PEERS_DENSE
        for kind, experts in () if float32_peer else peers:
            name = f"transformers {kind}" + (f", experts {experts}" if experts else "")
            sides[name] = peer_step(folder, ids, compiled=kind == "compiled", experts=experts)
        grouped = "grouped_mm" if shape.experts else None
        sides[IN_FLOAT32] = peer_step(folder, ids, compiled=True, experts=grouped, dtype=torch.float32)
        losses = check_losses(sides)
        samples = interleave(sides, rounds=rounds, warmup=1)
    ours = fastest(samples, [name for name in sides if name.startswith("te_models")])
    found: dict[str, Any] = {"shape": shape.to_dict(), "losses": losses, "step": summaries(samples)}
    found["speed_of_best_over_float32"] = speeds(samples, ours, IN_FLOAT32)
    if float32_peer:
        return found | {"best": {"te_models": ours}}
    peer = fastest(samples, [name for name in sides if name.startswith("transformers") and name != IN_FLOAT32])
    return found | {
        "best": {"te_models": ours, "transformers": peer},
        "speed_of_best_over_best": speeds(samples, ours, peer),
        "speed_eager_over_eager": speeds(
            samples, "te_models eager", fastest(samples, [n for n in sides if n.startswith("transformers eager")])
        ),
    }


def summaries(samples: dict[str, Samples]) -> dict[str, dict[str, float]]:
    return {name: s.summary() for name, s in samples.items()}


def speeds(samples: dict[str, Samples], ours: str, peer: str) -> dict[str, dict[str, float]]:
    """Return how many times faster ours is: the peer's time over our time, CPU and wall."""
    a, b = samples[peer], samples[ours]
    return {"cpu": ratio(a.cpu, b.cpu), "wall": ratio(a.wall, b.wall)}


def main() -> None:
    """Measure the shapes, print and write the result."""
    parser = argparse.ArgumentParser(prog="bench.train_step")
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in (*DENSE, *MOE)])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--float32-peer", action="store_true", help="against transformers in float32 alone")
    asked = parser.parse_args()
    rounds: int = asked.rounds
    torch.set_num_threads(1)
    cases = []
    for shape in (*DENSE, *MOE):
        if asked.shapes and shape.name not in asked.shapes:
            continue
        case = against_peers(shape, rounds, float32_peer=asked.float32_peer)
        cases.append(case)
        bf16 = "" if asked.float32_peer else f"{case['speed_of_best_over_best']['cpu']} of its best in bf16, "
        print(f"{shape.name}: {bf16}{case['speed_of_best_over_float32']['cpu']} of {IN_FLOAT32}", flush=True)
    packages = versions("torch", "transformers")
    write_result("train_step", {"versions": packages, "dtype": "bfloat16", "rounds": rounds, "cases": cases})


if __name__ == "__main__":
    main()
