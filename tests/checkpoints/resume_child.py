"""Kill conversions with SIGKILL after random times, run each again, and report what was left and what came of it.

Half of them are killed at any time, half after their first file was finished, however long that takes here.

The process that imports everything forks for each conversion, so that many moments cost little.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_models.checkpoints import check_manifest, import_hf, quantize

SHARD_BYTES = 20_000
CONVERSIONS: dict[str, Callable[[Path, Path], Any]] = {
    "import": lambda source, out: import_hf(source, out, max_shard_bytes=SHARD_BYTES),
    "quantize": lambda source, out: quantize(source, out, "block", max_shard_bytes=SHARD_BYTES),
}


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(convert: Callable[[Path, Path], Any], source: Path, out: Path) -> int:
    """Fork; convert in the child; return its process id."""
    pid = os.fork()
    if pid == 0:
        convert(source, out)
        os._exit(0)
    return pid


def main(source: Path, work: Path, count: int, seed: int) -> None:
    """Print a list of reports, one for each of `count` kills."""
    rng = random.Random(seed)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("te_models.checkpoints.write.resume").addHandler(handler)
    reports = []
    for number in range(count):
        name = sorted(CONVERSIONS)[number % len(CONVERSIONS)]
        convert = CONVERSIONS[name]
        reference = work / f"reference-{name}"
        if not reference.exists():
            convert(source, reference)
        begun = time.perf_counter()
        os.waitpid(start(convert, source, work / "whole"), 0)
        seconds = time.perf_counter() - begun
        shutil.rmtree(work / "whole")
        out = work / "out"
        pid = start(convert, source, out)
        if number % 4 < 2:
            time.sleep(rng.uniform(0, seconds))
        else:
            finished, latest = work / f".{out.name}.partial" / "finished", time.monotonic() + 30
            while not (out.exists() or list(finished.glob("*.json"))) and time.monotonic() < latest:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, seconds / 4))
        os.kill(pid, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        report: dict[str, Any] = {"conversion": name, "killed": killed, "appeared": out.exists()}
        if out.exists():
            check_manifest(out)
            report["complete"] = content(out) == content(reference)
            shutil.rmtree(out)
        messages.clear()
        convert(source, out)
        report["continued"] = " ".join(messages)
        report["equal"] = content(out) == content(reference)
        shutil.rmtree(out)
        report["left"] = sorted(p.name for p in work.iterdir() if not p.name.startswith("reference-"))
        reports.append(report)
    print(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
