"""Processor time of `from_pretrained` against reading the file's bytes, and against transformers.

    python -m bench.loading [--rounds 3] [--print-only]

SmolLM2-135M in bfloat16. Every round is a process for each side, which imports the library and the class of the model,
then reads the file's bytes into fresh memory and loads the model, twice in turn: a first load imports what it needs, a
second one has all that. One thread. Modules are compiled beforehand, as installed ones are: a round before the first
writes their bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import ratio, versions, write_result
from te_models.quickstart.smollm import smollm_folder

SIDES = ("te_models", "transformers")
LOADS = ("first", "second")


def one_side(name: str, folder: Path) -> dict[str, Any]:
    """Load twice in this process; return seconds of processor time, and how many modules each load imported."""
    import torch

    torch.set_num_threads(1)
    load: Callable[[], object]
    if name == "te_models":
        from te_models import GPTModel

        load = lambda: GPTModel.from_pretrained(folder, dtype=torch.bfloat16)  # noqa: E731
    else:
        from transformers import LlamaForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        load = lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # noqa: E731
    found: dict[str, Any] = {}
    for which in LOADS:
        begun = time.process_time()
        data = (folder / "model.safetensors").read_bytes()
        read = time.process_time() - begun
        del data
        modules, begun = len(sys.modules), time.process_time()
        model = load()
        found[which] = {"read": read, "load": time.process_time() - begun, "modules": len(sys.modules) - modules}
        del model  # as `data` is, where nobody looks at the time
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--print-only", action="store_true", help="write no result")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = smollm_folder()
    if args.side:
        print(json.dumps(one_side(args.side, folder)))
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    before = [round(x, 2) for x in os.getloadavg()]
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for number in range(1 + args.rounds):
            for name, found in runs.items():
                command = [sys.executable, "-W", "ignore", "-m", "bench.loading", "--side", name]
                ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                if number > 0:
                    found.append(json.loads(ended.stdout.splitlines()[-1]))
    results: dict[str, Any] = {"versions": versions("torch", "transformers"), "load_average_before": before}
    results["rounds"] = args.rounds
    for which in LOADS:
        loads = {name: [run[which]["load"] for run in found] for name, found in runs.items()}
        ours = [run[which] for run in runs["te_models"]]
        results[which] = {
            "load_ms": {name: round(1e3 * statistics.median(times), 1) for name, times in loads.items()},
            "read_ms": round(1e3 * statistics.median(run["read"] for run in ours), 1),
            "modules_imported": {name: found[-1][which]["modules"] for name, found in runs.items()},
            "of_reading": {
                name: ratio(times, [run[which]["read"] for run in runs[name]]) for name, times in loads.items()
            },
            "of_transformers": ratio(loads["te_models"], loads["transformers"]),
        }
        print(f"{which}: {results[which]}", flush=True)
    if not args.print_only:
        print(f"written to {write_result('loading', results)}")


if __name__ == "__main__":
    main()
