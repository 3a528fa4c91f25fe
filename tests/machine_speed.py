"""How slow this machine is beside the one that the tests' budgets were written on: `python -m tests.machine_speed`.

Printed is a factor, at least 1, for `pytest --budget`. Most of the suite's time is Python's and the compiler's, so that
is what is measured: an interpreter that imports torch, and a loop of Python."""

import resource
import subprocess
import sys

WRITTEN_ON_S = 6.3
"""Processor time of the work below on the machine that the budgets were written on."""
_WORK = "import torch, ast, inspect\nfor _ in range(40): ast.parse(inspect.getsource(torch.nn.functional))"


def seconds() -> float:
    """Return the processor time of the work, the lowest of three: the second and third find its files in memory."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-P", "-c", _WORK], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


if __name__ == "__main__":
    print(f"{max(1.0, seconds() / WRITTEN_ON_S):.2f}")
