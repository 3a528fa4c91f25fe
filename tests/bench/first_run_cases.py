"""Cases of a first run that needs no device: right, wrong, raising, dying, hanging; and the process that runs them.

python -m tests.bench.first_run_cases is `bench.gpu.first_run.worker` without torch: it starts in a tenth of a second.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.gpu.first_run.worker import WrongError, main

UNUSABLE = False


def wrong() -> None:
    raise WrongError("3 of 4 values differ")


def raises() -> None:
    raise RuntimeError("CUDA error: misaligned address\nof a kernel")


def leaves_the_device_unusable() -> None:
    global UNUSABLE
    UNUSABLE = True
    raises()


def dies() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs() -> None:
    """With a child that would outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FIRST_RUN_CHILD"]).write_text(str(child.pid))
    time.sleep(600)


def cases(setting: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    which = os.environ["FIRST_RUN_CASES"].split()
    known = {
        "right": lambda: {"says": "41 GB/s", "missing": {"Liger": "it is not installed"}},
        "wrong": wrong,
        "raises": raises,
        "leaves": leaves_the_device_unusable,
        "dies": dies,
        "hangs": hangs,
    }
    for at, name in enumerate(which):
        if name == "broken":
            raise OSError("no such sample")
        yield f"{name} {at}", known[name]


if __name__ == "__main__":
    made = SimpleNamespace(usable=lambda: not UNUSABLE)
    stand_in = SimpleNamespace(Setting=SimpleNamespace(make=lambda rehearse: made))
    sys.modules["bench.gpu.first_run.setting"] = stand_in
    sys.modules["tests.bench.first_run_cases"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
