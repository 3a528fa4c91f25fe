"""How benchmarks measure, and what they write down.

Machines are shared and clocks drift, so two sides are never timed one after the other: they take turns (A B C A B C),
each round gives one ratio, and the median of the ratios is the result, with their range beside it. One thread, CPU
time (wall time is written down too): with two busy processes on two cores, wall time of a two-thread step can be ten
times too long.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench import limited
from bench.commit import AT_START

RESULTS = Path(__file__).parent / "results"
RETURNS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
"""The environment of a process whose resident memory is measured: its allocator returns freed memory at once, so that
it is what live tensors take. It takes up to one and a half times the processor time."""
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "avx512_vnni")


@dataclass
class Samples:
    """Seconds of each round of one side."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "cpu_ms": round(1e3 * statistics.median(self.cpu), 2),
            "wall_ms": round(1e3 * statistics.median(self.wall), 2),
        }


def interleave(sides: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 2) -> dict[str, Samples]:
    """Run the sides in turn, `rounds` times after `warmup` unmeasured ones; return the samples of each."""
    for _ in range(warmup):
        for run in sides.values():
            run()
    samples = {name: Samples() for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            samples[name].cpu.append(time.process_time() - cpu)
            samples[name].wall.append(time.perf_counter() - wall)
    return samples


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Return the median and the range of the rounds' ratios."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    return {"median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def fastest(samples: dict[str, Samples], names: Sequence[str]) -> str:
    """Return which of the sides has the lowest median CPU time."""
    return min(names, key=lambda name: statistics.median(samples[name].cpu))


def machine() -> dict[str, Any]:
    """Describe the machine in general terms: what decides the speed, nothing that identifies it."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    present = set(text.split("flags", 1)[-1].split("\n", 1)[0].replace(":", " ").split())
    limit = os.environ.get(limited.VARIABLE)
    if limit:
        present &= {limit}
    return {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "cpu_flags": [flag for flag in _FLAGS if flag in present],
    } | ({"limited_to": limit} if limit else {})


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and the named distributions."""
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def result_file(name: str) -> Path:
    """Return the file of this kind of machine: bench/results/<name>.json, or where that is of a CPU with other
    instructions, <name>.<the newest ones here>.json. Results of both kinds stay."""
    file, here = RESULTS / f"{name}.json", machine()
    if "limited_to" in here:  # not what a machine without the other instructions gives
        return RESULTS / f"{name}.limited_to_{here['limited_to']}.json"
    if not file.exists():
        return file
    of_file = json.loads(file.read_text(encoding="utf-8"))["machine"]
    if (of_file["architecture"], of_file["cpu_flags"]) == (here["architecture"], here["cpu_flags"]):
        return file
    return RESULTS / f"{name}.{here['cpu_flags'][-1] if here['cpu_flags'] else here['architecture']}.json"


def write_result(name: str, payload: dict[str, Any]) -> Path:
    """Write a benchmark's `result_file`, adding the machine and the commit."""
    RESULTS.mkdir(exist_ok=True)
    file = result_file(name)
    result = {"benchmark": name, "measured_at": AT_START, "machine": machine()} | payload
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return file


def update_result(name: str, parts: dict[str, Any], packages: Sequence[str]) -> Path:
    """Put parts that were measured again into a benchmark's `result_file`, each with the commit that it was measured
    at.

    ValueError where the file is of another machine or of other versions: its ratios would not be of one kind.
    """
    file = result_file(name)
    if not file.exists():
        raise ValueError(f"{file.name} does not exist yet on this kind of machine; measure all parts")
    result = json.loads(file.read_text(encoding="utf-8"))
    here = {"machine": machine(), "versions": versions(*packages)}
    for what, value in here.items():
        if result[what] != value:
            raise ValueError(f"{file.name} has {what} {result[what]}, and here it is {value}; measure all parts again")
    apart = result.get("measured_apart", {}) | dict.fromkeys(parts, AT_START)
    return write_result(name, result | parts | {"measured_at": result["measured_at"], "measured_apart": apart})
