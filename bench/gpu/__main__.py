"""Measure the kernels on this machine's GPU, print a table and write bench/results/gpu.json.

    python -m bench.gpu [--seconds 540] [--output FILE] [SECTION ...]

Sections: quantize, norms, permute, scaled, grouped, linear; all of them without a name, the quickest to measure
first. A result is compared with its reference before it is timed. What cannot run says why. Exit status: 0; 1 where a
case failed or was wrong; 2 where there is no CUDA device (nothing is written then).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.commit import AT_START
from bench.common import RESULTS, versions

from . import grouped, linear, norms, permute, quantize, report, scaled
from .case import Case, installed
from .shapes import H100, Shapes
from .timing import Budget, CudaTimer, Timer, ceilings, measure

Cases = Callable[[torch.device, Shapes], Iterator[Callable[[], Case]]]
SECTIONS: dict[str, Cases] = {
    "quantize": quantize.cases,
    "norms": norms.cases,
    "permute": permute.cases,
    "scaled": scaled.cases,
    "grouped": grouped.cases,
    "linear": linear.cases,
}
# Seconds that one case may take, compiling included: none starts later than this before the end.
RESERVE = {"quantize": 10, "norms": 10, "permute": 10, "scaled": 20, "grouped": 20, "linear": 90}
NO_DEVICE = "bench.gpu needs a CUDA device, and torch finds none here: nothing was measured or written."


def run(
    names: list[str], device: torch.device, shapes: Shapes, timer: Timer, budget: Budget
) -> tuple[list[report.Row], list[report.Gap], dict[str, Any]]:
    """Measure the named sections; return the rows, what was not measured, and the ceilings."""
    found = ceilings(device, timer, megabytes=shapes.copy_megabytes, size=shapes.matmul)
    rows: list[report.Row] = []
    gaps: list[report.Gap] = []
    for name in names:
        late = 0
        for build in SECTIONS[name](device, shapes):
            if budget.exhausted(RESERVE[name]) is not None:
                late += 1
                continue
            new, missing = _measured(name, build, timer, found)
            rows += new
            gaps += [gap for gap in missing if gap not in gaps]
            gc.collect()
        if late:
            why = budget.exhausted(RESERVE[name]) or ""
            gaps.append(report.Gap(name, f"{late} case{'s' if late > 1 else ''}", why))
    return rows, gaps, found


def _measured(
    section: str, build: Callable[[], Case], timer: Timer, found: dict[str, Any]
) -> tuple[list[report.Row], list[report.Gap]]:
    what = "a case that could not be built"
    try:
        case = build()
        what = case.name
        case.check({name: side() for name, side in case.sides.items()})
        rows = report.rows_of(section, case, measure(case.sides, timer), found)
    except Exception as error:  # one case that fails, whatever the reason, does not end the others
        lines = str(error).strip().splitlines() or [""]
        return [], [report.Gap(section, what, f"{type(error).__name__}: {lines[0]}", failed=True)]
    return rows, [report.Gap(section, side, why) for side, why in case.missing.items()]


def describe(device: torch.device) -> dict[str, Any]:
    """Describe a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def software() -> dict[str, str | None]:
    """Return the versions of all that takes part; None for a peer that is not installed."""
    peers = {name: installed(name) for name in ("triton", "liger-kernel", "torchao")}
    return versions("torch") | {"cuda": torch.version.cuda} | peers


def main(arguments: list[str]) -> int:
    """Run the command, return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=540, help="how long it may take (default: 540)")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json", help="where the JSON goes")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; allowed: {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    device, budget = torch.device("cuda"), Budget(options.seconds)
    torch.manual_seed(0)
    rows, gaps, found = run(options.sections or list(SECTIONS), device, H100, CudaTimer(device), budget)
    about = {"benchmark": "gpu", "measured_at": AT_START, "device": describe(device)}
    about |= {"versions": software(), "ceilings": found}
    print(f"{about['device']['name']}: {found['copy_bytes_per_s'] / 1e9:.0f} GB/s copied, ", end="")
    print(f"{found['bf16_flop_per_s'] / 1e12:.0f} TFLOP/s in bf16; {about['versions']}")
    print("\n".join(text for text in (report.table(rows), report.gaps_text(gaps)) if text))
    about["seconds"] = round(budget.used, 1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report.payload(rows, gaps, **about), indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.output} after {budget.used:.0f} s")
    return 1 if any(gap.failed for gap in gaps) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
