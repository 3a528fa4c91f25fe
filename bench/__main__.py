"""Run the benchmarks that fit in a quarter of an hour, each in its own process: `make bench`.

python -m bench [NAME ...]   the named ones only, for example `train_step`; a name alone: python -m bench.train_step
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = {"train_step": [], "recipe_step": ["1024"], "import_throughput": [], "quantize": []}
"""Each with its arguments: of the recipes only one size fits, the whole table is `python -m bench.recipe_step`."""


def main(names: list[str]) -> int:
    """Run the benchmarks, return 1 if one failed."""
    failed = 0
    for name in names or BENCHMARKS:
        file = HERE / f"{name}.py"
        if not file.is_file():
            sys.exit(f"there is no benchmark {name!r}; allowed: {', '.join(BENCHMARKS)}")
        begun = time.perf_counter()
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}", *([] if names else BENCHMARKS[name])]
        failed += subprocess.run(command, cwd=HERE.parent, check=False).returncode != 0
        print(f"== {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
