"""What one eager forward call costs in Python: microseconds and calls of our functions, here and in another checkout.

    python -m bench.eager_calls [--before CHECKOUT] [--rounds 5]

Linear(128, 128) on 64 rows and GroupedLinear(4, 128, 128) on 64 rows in bfloat16, as in a training step: at this size
nearly all time is Python's. Checkouts take turns in new processes; each figure is the lowest of the rounds, in
processor time. CHECKOUT is a folder with another commit of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import versions, write_result

_HERE = Path(__file__).resolve().parent.parent
_MEASURE = """
import json, sys, time, warnings
import torch
import te_models.layers as te
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
found = {}
x, splits = torch.randn(64, 128, dtype=torch.bfloat16), torch.full((4,), 16)
for kind in ("Linear", "GroupedLinear"):
    grouped = kind == "GroupedLinear"
    layer = (te.GroupedLinear(4, 128, 128, bias=False) if grouped else te.Linear(128, 128)).bfloat16()
    arguments = (x, splits) if grouped else (x,)
    for name in ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4"):
        with te.autocast(enabled=name != "bf16", recipe=None if name == "bf16" else te.recipe(name)):
            for _ in range(50):
                layer(*arguments)
            begun = time.process_time()
            for _ in range(500):
                layer(*arguments)
            us = (time.process_time() - begun) / 500 * 1e6
            count = 0
            def note(frame, event, argument):
                global count
                count += event == "call" and frame.f_code.co_filename.startswith(sys.path[0] + "/te_models/")
            sys.setprofile(note)
            layer(*arguments)
            sys.setprofile(None)
        found[f"{kind} {name}"] = [us, count]
print(json.dumps(found))
"""


def _measure(checkout: Path) -> dict[str, list[float]]:
    """Run the measurement with the package as a checkout has it."""
    script = f"import sys; sys.path.insert(0, {str(checkout)!r})\n{_MEASURE}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        run = subprocess.run(
            [sys.executable, "-c", script], cwd=scratch, env=environment, capture_output=True, text=True, check=True
        )
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder with another commit")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkouts = {"now": _HERE} | ({"before": options.before.resolve()} if options.before else {})
    rounds = [{name: _measure(path) for name, path in checkouts.items()} for _ in range(options.rounds)]
    cases: dict[str, dict[str, Any]] = {}
    for case in rounds[0]["now"]:
        lowest = {name: min(r[name][case][0] for r in rounds) for name in checkouts}
        calls = {name: rounds[0][name][case][1] for name in checkouts}
        cases[case] = {name: {"us": round(lowest[name], 1), "python_calls": calls[name]} for name in checkouts}
        if "before" in checkouts:
            cases[case]["now_over_before"] = round(lowest["now"] / lowest["before"], 3)
        print(f"{case}: {cases[case]}", flush=True)
    found: dict[str, Any] = {"cases": cases, **versions()}
    if options.before:
        git = ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"]
        found["before_commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    write_result("eager_calls", found)


if __name__ == "__main__":
    main()
