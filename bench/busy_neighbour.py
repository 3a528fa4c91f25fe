"""Decoding beside a process that computes all the time: te_models and transformers, quiet and busy, in turn.

    python -m bench.busy_neighbour MODEL_FOLDER [--threads 2] [--tokens 16] [--rounds 3] [--print-only]

bfloat16, batch 1, greedy. Milliseconds of wall time a token; the neighbour is one single-threaded process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import versions, write_result
from te_models import GPTModel
from te_models.generation import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--print-only", action="store_true", help="write no result")
    args = parser.parse_args()
    import transformers

    torch.set_num_threads(args.threads)
    prompt = torch.arange(100, 116)[None]
    mine = GPTModel.from_pretrained(args.folder, dtype=torch.bfloat16).eval()
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16)
    how = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "do_sample": False}
    sides: dict[str, Callable[[], object]] = {
        "te_models": lambda: generate(mine, prompt, args.tokens),
        "transformers": lambda: theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **how),
    }
    load = [round(x, 2) for x in os.getloadavg()]
    found: dict[str, list[float]] = {f"{name} {state}": [] for name in sides for state in ("quiet", "busy")}
    for run in sides.values():
        run()
    for _ in range(args.rounds):
        for state in ("quiet", "busy"):
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if state == "busy" else None
            try:
                for name, run in sides.items():
                    begun = time.perf_counter()
                    run()
                    found[f"{name} {state}"].append(1e3 * (time.perf_counter() - begun) / args.tokens)
            finally:
                if neighbour is not None:
                    neighbour.kill()
                    neighbour.wait()
    results: dict[str, Any] = {"versions": versions("torch", "transformers"), "load_average_before": load}
    results |= {"threads": args.threads, "tokens": args.tokens, "rounds": args.rounds}
    results["wall_ms_a_token"] = {name: round(statistics.median(values), 1) for name, values in found.items()}
    for name in sides:
        ratios = [b / q for b, q in zip(found[f"{name} busy"], found[f"{name} quiet"], strict=True)]
        results[f"{name} busy_of_quiet"] = round(statistics.median(ratios), 3)
    print(results)
    if not args.print_only:
        print(f"written to {write_result('busy_neighbour', results)}")


if __name__ == "__main__":
    main()
