"""Run conversions and report the peak anonymous memory of each above that of the interpreter before it.

Anonymous memory (RssAnon) is what a process cannot give back; pages of mapped files, which the kernel drops at will, do
not count. It is sampled by a thread, so short peaks need the conversion to last longer than the sampling interval."""

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import te_models.checkpoints as checkpoints
from te_models.layers import MXFP8Quantizer
from te_models.memory import return_freed_memory

# torch loads its formulas for the meta device (40 MiB) when the first of them is asked for
MXFP8Quantizer().quantize_fields(torch.empty(1, 1, device="meta"))


def anonymous() -> int:
    """Return RssAnon in bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def peak_of(verb: str, source: str, destination: str, options: dict[str, Any]) -> dict[str, int]:
    """Run `checkpoints.<verb>(source, destination, **options)` and return {"peak": bytes, "samples": count}."""
    return_freed_memory()
    before, peak, samples, done = anonymous(), 0, 0, threading.Event()

    def sample() -> None:
        nonlocal peak, samples
        while not done.wait(0.002):
            peak, samples = max(peak, anonymous() - before), samples + 1

    thread = threading.Thread(target=sample)
    thread.start()
    getattr(checkpoints, verb)(source, destination, **options)
    done.set()
    thread.join()
    return {"peak": max(peak, anonymous() - before), "samples": samples}


if __name__ == "__main__":
    print(json.dumps([peak_of(*step) for step in json.loads(sys.argv[1])]))
