"""How much faster two threads train than one, against what two cores of this machine have to give.

    python -m bench.thread_scaling [--rounds 2] [--print-only]

In each round a new process with one thread takes compiled steps, then two such processes take theirs at the same time,
then one with two threads. `two_threads` is the time of the first over the time of the last (target: 1.8), `ceiling`
twice the time of the first over that of the two together: what cores that share units, caches and memory give to work
that shares nothing. Of each round the median step counts. Wall time, so nothing else may run: not even a process that
waits beside, which made steps of a mixture take 1.2 times the processor time on one machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch

from bench.common import ratio, versions, write_result
from bench.recipes import named
from bench.shapes import DENSE, MOE
from bench.steps import our_step

TARGET = 1.8
SHAPES = {shape.name: shape for shape in (*DENSE, *MOE) if shape.hidden == 1024}
RECIPES = ("bf16", "mxfp8")
WARMUP, STEPS = 2, 5


def worker(folder: Path, shape: str, recipe: str, threads: int) -> None:
    """Take a step for each line that arrives, and answer with its seconds."""
    torch.set_num_threads(threads)
    step = our_step(folder, SHAPES[shape].input_ids(), compiled=True, recipe=named(recipe))
    for _ in range(WARMUP):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        step()
        print(time.perf_counter() - begun, flush=True)


class Process:
    """A process that takes steps."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "bench.thread_scaling", "--worker", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while self._answer() != "ready":
            pass

    def _answer(self) -> str:
        line = _of(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"a process ended with status {self.process.wait()}")
        return line.strip()

    def begin(self) -> None:
        pipe = _of(self.process.stdin)
        pipe.write("\n")
        pipe.flush()

    def end(self) -> float:
        return float(self._answer())

    def close(self) -> None:
        _of(self.process.stdin).close()
        self.process.wait()


def _of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def together(*processes: Process) -> float:
    """Return the seconds until each of these has taken a step."""
    for process in processes:
        process.begin()
    return max([process.end() for process in processes])


def steps(folder: Path, shape: str, recipe: str, *threads: int) -> float:
    """Return the median seconds of a step of new processes, as many threads each, at the same time."""
    processes = [Process(str(folder), shape, recipe, str(own)) for own in threads]
    found = statistics.median([together(*processes) for _ in range(STEPS)])
    for process in processes:
        process.close()
    return found


def case(folder: Path, shape: str, recipe: str, rounds: int) -> dict[str, Any]:
    """Measure one model under one recipe."""
    found = [[steps(folder, shape, recipe, *threads) for threads in ((1,), (1, 1), (2,))] for _ in range(rounds)]
    alone, both, threads = ([times[i] for times in found] for i in range(3))
    result = {
        "alone_ms": [round(1e3 * t, 1) for t in alone],
        "two_threads": ratio(alone, threads),
        "ceiling": ratio([2 * t for t in alone], both),
    }
    share = result["two_threads"]["median"] / result["ceiling"]["median"]
    return result | {"of_ceiling": round(share, 3), "met": result["two_threads"]["median"] >= TARGET}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--print-only", action="store_true", help="write no file")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, shape, recipe, threads = options.worker
        worker(Path(folder), shape, recipe, int(threads))
        return
    cases = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            SHAPES[shape].write_random_model(Path(scratch))
            for recipe in RECIPES:
                found = cases[f"{shape} {recipe}"] = case(Path(scratch), shape, recipe, options.rounds)
                print(f"{shape} {recipe}: {json.dumps(found)}", flush=True)
    if not options.print_only:
        torch.set_num_threads(2)
        payload = {"versions": versions("torch"), "target": TARGET, "cases": cases}
        print(f"written to {write_result('thread_scaling', payload)}")


if __name__ == "__main__":
    main()
