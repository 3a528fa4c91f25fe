"""Run one conversion and report its peak anonymous memory above that of the interpreter after imports.

Anonymous memory (RssAnon) is what a process cannot give back; pages of mapped files, which the kernel drops at will, do
not count. It is sampled by a thread, so short peaks need the conversion to last longer than the sampling interval.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import torch

import te_models.checkpoints as checkpoints
from te_models.layers import MXFP8Quantizer

# torch loads its formulas for the meta device (40 MiB) when the first of them is asked for
MXFP8Quantizer().quantize_fields(torch.empty(1, 1, device="meta"))


def anonymous() -> int:
    """Return RssAnon in bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(verb: str, source: str, destination: str, options: str) -> None:
    """Run `checkpoints.<verb>(source, destination, **options)` and print {"peak": bytes, "samples": count}."""
    before, peak, samples, done = anonymous(), 0, 0, threading.Event()

    def sample() -> None:
        nonlocal peak, samples
        while not done.wait(0.002):
            peak, samples = max(peak, anonymous() - before), samples + 1

    thread = threading.Thread(target=sample)
    thread.start()
    getattr(checkpoints, verb)(source, destination, **json.loads(options))
    done.set()
    thread.join()
    print(json.dumps({"peak": max(peak, anonymous() - before), "samples": samples}))


if __name__ == "__main__":
    main(*sys.argv[1:])
