"""One process of one part: `python -m bench.gpu.first_run.worker MODULE --log FILE --slot I --of N --skip K`.

It writes a line of JSON before each case and one after it, so that what was running when a process dies is known. A
case that leaves the device unusable, as an access to foreign memory does, ends the process after its line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

UNUSABLE = 3
"""The exit status of a process whose device answers no more."""


class WrongError(Exception):
    """What a case found is wrong; its message says with which values."""


def write(log: TextIO, line: dict[str, Any]) -> None:
    """Append a line, whole, whatever happens to the process afterwards."""
    log.write(json.dumps(line) + "\n")
    log.flush()
    os.fsync(log.fileno())


def answer(run: Any) -> dict[str, Any]:
    """Run a case; return what is written of it."""
    begun = time.perf_counter()
    try:
        found: dict[str, Any] = {"found": run() or {}}
    except WrongError as error:
        found = {"wrong": str(error)}
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        trace = traceback.format_exc().splitlines()[-12:]
        found = {"wrong": f"{type(error).__name__}: {text[:500]}", "trace": trace}
    return found | {"seconds": round(time.perf_counter() - begun, 3)}


def main(arguments: list[str]) -> int:
    """Run the cases of one slot, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.first_run.worker")
    parser.add_argument("module")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    from .setting import Setting

    setting = Setting.make(rehearse=options.rehearse)
    cases = importlib.import_module(options.module).cases(setting)
    with options.log.open("a", encoding="utf-8") as log:
        for at, (name, run) in enumerate(cases):
            if at < options.skip or at % options.of != options.slot:
                continue
            write(log, {"begun": at, "case": name})
            line = answer(run)
            write(log, {"at": at, "case": name} | line)
            if "wrong" in line and not setting.usable():
                return UNUSABLE
        write(log, {"done": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
