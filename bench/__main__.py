"""Run the benchmarks that fit in a quarter of an hour, each in its own process: `make bench`.

python -m bench [NAME ...]   the named ones only, for example `train_step`, each of them whole
python -m bench --all        all of them, whole: most of an hour

What was left out is named at the end, with the reason. A name alone: python -m bench.train_step
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = {
    "train_step": [],
    "recipe_step": ["1024"],
    "import_throughput": [],
    "quantize": [],
    "moments": [],
    "noting_statistics": [],
    "stored_decode": [],
    "flash_attention": [],
    "windowed_attention": [],
    "recurrent_rules": [],
    "expert_dispatch": [],
}
"""What runs without a name, each with its arguments."""
LEFT_OUT = {
    "recipe_step": "its four shapes compile 28 steps, about as long as all the others here together; only the shape "
    "that has just run fits, and nothing was written",
    "training_curves": "seven runs of 300 steps, a quarter of an hour of processor time",
    "recipe_gap": "ninety runs of 1,000 steps, 52 minutes of processor time",
    "qat": "fifteen runs of 200 steps, some minutes: python -m bench.qat",
    "optimizers": "twelve runs of 100 steps, some minutes: python -m bench.optimizers",
    "rehearsal": "it rehearses SmolLM2-135M and runs it over fresh seeds: most of an hour of processor time",
    "memory": "42 processes, two thirds of them compile: twenty minutes",
    "generation": "three models, four prompts each in two dtypes, recipes and the compiled model: half an hour",
    "compile": "it compiles seven recipes' steps and five models from nothing, most of ten minutes",
    "eager_calls": "it compares with another checkout: python -m bench.eager_calls --before DIR",
    "boundary": "it compiles two layers two dozen times, twelve of them from nothing, five minutes",
    "ranks": "it trains on two ranks in four layouts, which takes both cores: python -m bench.ranks",
    "limited": "it runs another benchmark, as a CPU with AVX2 alone would: python -m bench.limited NAME",
    "loading": "ten processes that import torch, a minute: python -m bench.loading",
    "decode": "it loads two models of 135 million parameters, a minute: python -m bench.decode",
    "saving": "it saves on one, two and four ranks: python -m bench.saving",
    "busy_neighbour": "it starts processes that take the cores: python -m bench.busy_neighbour",
    "thread_scaling": "it takes both cores, and nothing else may run: python -m bench.thread_scaling",
    "adopt_families": "it hides every family in turn, half an hour: python bench/adopt_families.py FILE",
    "gpu": "it needs a CUDA device: python -m bench.gpu",
}
"""What `python -m bench` does not run, or not whole, and why."""
EVERY = [
    *BENCHMARKS,
    "training_curves",
    "recipe_gap",
    "qat",
    "optimizers",
    "rehearsal",
    "memory",
    "generation",
    "compile",
    "boundary",
    "ranks",
    "loading",
    "decode",
    "saving",
    "adopt_families",
    "busy_neighbour",
    "thread_scaling",
]


def main(arguments: list[str]) -> int:
    """Run the benchmarks, return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EVERY))
    parser.add_argument("--all", action="store_true", help="all of them")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in EVERY:
            parser.error(f"there is no benchmark {name!r}; allowed: {', '.join(EVERY)}")
    whole = EVERY if options.all else options.names
    failed = 0
    for name in whole or BENCHMARKS:
        begun = time.perf_counter()
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}", *([] if whole else BENCHMARKS[name])]
        failed += subprocess.run(command, cwd=HERE.parent, check=False).returncode != 0
        print(f"== {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    if not options.names:
        for name, why in LEFT_OUT.items():
            if name not in whole:
                print(f"== left out: {name}: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
