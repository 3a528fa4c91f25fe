"""Run a conversion again and again, each time killed with SIGKILL at another moment, and report what is left.

One process imports everything and forks for each moment, so that many moments cost little.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from te_models.checkpoints import CheckpointError, check_manifest, import_hf, verify

# quick: the weights are flushed when written (1); then all five files (2-6), the new folder (7), and its parent after
# the exchange of names (8, 9)
QUICK = [
    ("bytes", 0.0),
    ("bytes", 0.5),
    ("bytes", 1.0),
    ("flush", 1),
    *(("flush", n) for n in (6, 7, 8, 9)),
    ("cleanup", 1),
]
THOROUGH = [*(("bytes", n / 30) for n in range(31)), *(("flush", n) for n in range(1, 24)), ("cleanup", 1)]


def killed_run(source: Path, destination: Path, moment: tuple[str, float], shard_bytes: int) -> bool:
    """Fork, convert, die at the moment; return whether the moment came."""
    pid = os.fork()
    if pid == 0:
        kind, when = moment
        count = 0

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def nth(function):  # type: ignore[no-untyped-def]
            def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
                nonlocal count
                count += 1
                if count == when:
                    die()
                return function(*args, **kwargs)

            return wrapper

        if kind == "flush":
            os.fsync = nth(os.fsync)
        elif kind == "cleanup":
            shutil.rmtree = nth(shutil.rmtree)

        def progress(done: int, total: int) -> None:
            if kind == "bytes" and done >= when * total:
                die()

        import_hf(source, destination, overwrite=True, max_shard_bytes=shard_bytes, progress=progress)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def state(destination: Path, old: Path, new: Path) -> str:
    """Return which complete folder the destination is: "absent", "old", "new" or "broken"."""
    if not destination.exists():
        return "absent"
    try:
        check_manifest(destination)
        return "old" if verify(destination, old).equal else "new" if verify(destination, new).equal else "broken"
    except CheckpointError as error:
        return f"broken: {error}"


def main(old: Path, new: Path, work: Path, thorough: bool) -> None:
    """Kill imports of `new` over nothing, and over an import of `old`; print a list of reports."""
    moments, shard_bytes = (THOROUGH, 20_000) if thorough else (QUICK, 10**9)
    reports = []
    for existing in (False, True):
        for moment in moments:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            destination = work / "model"
            if existing:
                import_hf(old, destination)
            came = killed_run(new, destination, moment, shard_bytes)
            report = {"moment": moment, "existing": existing, "came": came, "state": state(destination, old, new)}
            report["partial"] = [p.name for p in work.iterdir() if p.name != "model"]
            import_hf(new, destination, overwrite=True)
            report["after"] = state(destination, old, new)
            report["left"] = [p.name for p in work.iterdir() if p.name != "model"]
            reports.append(report)
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), thorough=sys.argv[4] == "thorough")
