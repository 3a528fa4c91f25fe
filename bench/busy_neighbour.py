"""Decoding beside a process that computes all the time: te_models and transformers, quiet and busy, in turn.

    python -m bench.busy_neighbour [--threads N] [--tokens 16] [--rounds 3] [--print-only]

SmolLM2-135M in bfloat16, batch 1, greedy, a prompt of 32 tokens, in wall time, with as many threads as the machine has
cores; the neighbours are single-threaded processes, one for every two cores. Quiet and busy times are of one round.
On two cores it takes a minute and a half, most of it transformers beside the neighbour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.common import Samples, ratio, versions, write_result
from bench.generation import Side, Tokens, of_gpt, of_transformers, prompt
from te_models import GPTModel
from te_models.quickstart.smollm import smollm_folder

LENGTH = 32
PHASES = ("prefill", "decode")


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Inside, so many other processes compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def timed(run: Side, new: int, into: dict[str, Samples]) -> None:
    tokens = Tokens()
    run(1 + new, tokens)
    begun, first, *_, last = tokens.times
    for phase, start, end, count in (("prefill", begun, first, LENGTH), ("decode", first, last, new)):
        into[phase].cpu.append((end[0] - start[0]) / count)
        into[phase].wall.append((end[1] - start[1]) / count)


def measure(sides: dict[str, Side], rounds: int, new: int) -> dict[str, Any]:
    """Run all sides quietly and beside neighbours, in turn."""
    samples = {name: {state: {phase: Samples() for phase in PHASES} for state in ("quiet", "busy")} for name in sides}
    for run in sides.values():
        run(4, Tokens())
    for _ in range(rounds):
        for state, others in (("quiet", 0), ("busy", (os.cpu_count() or 2) // 2)):
            with neighbours(others):
                for name, run in sides.items():
                    timed(run, new, samples[name][state])
    found: dict[str, Any] = {}
    for name, states in samples.items():
        found[name] = {
            phase: {
                "quiet_ms": round(1e3 * statistics.median(states["quiet"][phase].wall), 2),
                "busy_ms": round(1e3 * statistics.median(states["busy"][phase].wall), 2),
                "busy_of_quiet": ratio(states["busy"][phase].wall, states["quiet"][phase].wall),
            }
            for phase in PHASES
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--print-only", action="store_true", help="write no result")
    args = parser.parse_args()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    folder, ids = smollm_folder(), prompt(1, LENGTH)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    sides = {
        "te_models": of_gpt(GPTModel.from_pretrained(folder, dtype=torch.bfloat16).eval(), ids),
        "transformers": of_transformers(theirs, ids),
    }
    load = [round(x, 2) for x in os.getloadavg()]
    results = {"versions": versions("torch", "transformers"), "load_average_before": load}
    results |= {"tokens": args.tokens, "rounds": args.rounds} | measure(sides, args.rounds, args.tokens)
    for name in sides:
        print(f"{name}: {results[name]}", flush=True)
    if not args.print_only:
        print(f"written to {write_result('busy_neighbour', results)}")


if __name__ == "__main__":
    main()
