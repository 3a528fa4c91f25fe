"""Ask a GPU what is wrong, the most valuable questions first: `python -m bench.gpu.first_run`.

    python -m bench.gpu.first_run [--minutes 8] [--out FOLDER] [PART ...]
    python -m bench.gpu.first_run --rehearse      on a CPU: Triton's interpreter, fake devices, small samples

Every part runs in processes of its own, which end at a limit. FOLDER/first_run.json is written anew after each part,
FOLDER/<part>.<n>.jsonl after each case, FOLDER/summary.txt and the last lines of the output say what is wrong with
which input. Exit status: 0 where nothing is wrong, 1 where something is, 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.commit import AT_START

from .plan import PARTS, Part, share, too_little
from .runner import run_part, write_json
from .summary import in_words, is_wrong

NO_DEVICE = (
    "bench.gpu.first_run needs a CUDA device, and torch finds none here; --rehearse runs it on a CPU. Nothing was run."
)


def run(parts: Sequence[Part], minutes: float, out: Path, *, rehearse: bool) -> list[dict[str, Any]]:
    """Run the parts in order, write the results after each, return them."""
    out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    about = {"benchmark": "first_run", "measured_at": AT_START, "rehearsal": rehearse, "minutes": minutes}
    found: list[dict[str, Any]] = []
    for at, part in enumerate(parts):
        seconds = share(parts[at:], 60 * minutes - (time.perf_counter() - begun))
        why = too_little(part, seconds)
        if why is None:
            print(f"== {part.name}: {part.question}, at most {seconds:.0f} s", flush=True)
            found.append(run_part(part, seconds, out, rehearse=rehearse))
        else:
            found.append({"part": part.name, "question": part.question, "skipped": why})
        taken = round(time.perf_counter() - begun, 1)
        write_json(out / "first_run.json", about | {"seconds": taken, "parts": found})
        text = in_words(found)
        (out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    return found


def main(arguments: list[str]) -> int:
    """Run the command, return its exit status."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.first_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; all without a name")
    parser.add_argument("--minutes", type=float, help="how long it may take (default: 8; a rehearsal: 60)")
    parser.add_argument("--out", type=Path, default=Path("first-run"), help="where results go (default: ./first-run)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small samples")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in names]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; allowed: {', '.join(names)}")
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            print(NO_DEVICE, file=sys.stderr)
            return 2
    minutes = options.minutes or (60.0 if options.rehearse else 8.0)
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    found = run(chosen, minutes, options.out.resolve(), rehearse=options.rehearse)
    print(in_words(found))
    print(f"written to {options.out}/first_run.json")
    return 1 if any(is_wrong(part) for part in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
