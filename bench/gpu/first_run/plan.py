"""The parts of the first run, the most valuable first, and how the minutes are divided among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HERE = "bench.gpu.first_run"


@dataclass(frozen=True)
class Part:
    """One question.

    module: has `cases(setting)`, which yields (name, function) in an order that is the same in every process. seconds:
    its share where all parts share eight minutes. least: seconds below which it is not worth a start. workers: how many
    processes share its cases; each compiles kernels of its own. case_seconds: how long one case may take.
    """

    name: str
    module: str
    question: str
    seconds: float
    least: float = 10
    workers: int = 1
    case_seconds: float = 60


PARTS = (
    Part("device", f"{HERE}.device", "device, versions, and which peers can be imported", 20),
    Part("kernels", f"{HERE}.kernels", "every Triton kernel against its definition", 110, workers=8, case_seconds=30),
    Part("bits", f"{HERE}.bits", "quantized bits against the recorded ones", 25, workers=4, case_seconds=30),
    Part("modules", f"{HERE}.modules", "every module, forward and backward, against the CPU", 65, workers=6),
    Part("compiled", f"{HERE}.compiled", "full graphs under every recipe", 75, workers=8, case_seconds=75),
    Part("training", f"{HERE}.training", "a train step of 135 million parameters", 100, least=20, case_seconds=90),
    Part("speed", f"{HERE}.speed", "kernels against a copy, torch, Liger and torchao", 60, case_seconds=90),
    Part("graphs", f"{HERE}.graphs", "CUDA graphs, peak memory, waits of the host", 25),
)


def share(parts: Sequence[Part], left: float) -> float:
    """Return the seconds that the first of the parts may take of those that are left to all of them."""
    return left * parts[0].seconds / sum(part.seconds for part in parts)


def too_little(part: Part, seconds: float) -> str | None:
    """Return why a part is not started with so many seconds, None where it is."""
    if seconds >= part.least:
        return None
    return f"its share of what is left is {seconds:.0f} s, and it takes {part.least:.0f} s or more"
