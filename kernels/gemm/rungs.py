"""Which implementation ("rung") of an operation runs, why, and how often: no silent fallback.

An operation lists its rungs, fastest first, with the reason for each one it passes over. The last one, the emulation,
multiplies dequantized operands. On CPU that is the intended way. On an accelerator it is a fallback: it warns once
per reason, is counted, and is an error where the caller is strict.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

EMULATION = "emulation"


class Hardware(NamedTuple):
    """What decides: device type, compute capability, whether Triton has a build, the CUDA version of torch."""

    type: str
    capability: tuple[int, int] = (0, 0)
    triton: bool = False
    cuda: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return self.type if self.type != "cuda" else f"compute capability {self.capability[0]}.{self.capability[1]}"


def hardware(device: torch.device) -> Hardware:
    """Describe a device."""
    # not cached for a CPU: the compiler traces this there, and does not trace caches
    return Hardware(device.type) if device.type != "cuda" or torch.version.cuda is None else _cuda(device)


@functools.cache
def _cuda(device: torch.device) -> Hardware:
    assert torch.version.cuda is not None
    major, minor = torch.version.cuda.split(".")[:2]
    triton = importlib.util.find_spec("triton") is not None
    return Hardware("cuda", torch.cuda.get_device_capability(device), triton, (int(major), int(minor)))


def in_plain_torch(device: torch.device) -> bool:
    """Whether scaled GEMMs on this device are plain torch that the compiler sees, rather than registered ops."""
    return device.type == "cpu"


class Choice(NamedTuple):
    """The rung that runs, and those passed over for it with a reason each."""

    operation: str
    rung: str
    passed_over: tuple[tuple[str, str], ...] = ()
    fallback: bool = False

    def __str__(self) -> str:
        reasons = "".join(f"; not {rung}: {reason}" for rung, reason in self.passed_over)
        return f"{self.operation} runs as {self.rung}{reasons}"


def first_possible(
    operation: str, rungs: tuple[tuple[str, str | None], ...], *, last: str = EMULATION, fallback: bool
) -> Choice:
    """Return the first rung without a reason against it, else `last`, which is a fallback where so said."""
    passed_over: list[tuple[str, str]] = []
    for rung, reason in rungs:
        if reason is None:
            return Choice(operation, rung, tuple(passed_over))
        passed_over.append((rung, reason))
    return Choice(operation, last, tuple(passed_over), fallback)


_counts: Counter[tuple[str, str]] = Counter()
_warned: set[str] = set()
_strict = False


def record(choice: Choice, *, strict: bool) -> None:
    """Count a choice. A last rung raises ValueError when strict; where it is a fallback it warns once per reason."""
    if (strict and choice.rung == EMULATION) or (_strict and choice.fallback):
        raise ValueError(f"{choice}; strict asks for a GEMM on the quantized numbers themselves")
    if torch.compiler.is_compiling():
        return  # a graph is traced once and runs often, so a count would be wrong
    _counts[choice.operation, choice.rung] += 1
    if choice.fallback and str(choice) not in _warned:
        _warned.add(str(choice))
        warnings.warn(str(choice), RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def strict_gemms(enabled: bool = True) -> Iterator[None]:
    """Inside, a GEMM on an accelerator that would fall back raises ValueError instead of warning once. What runs
    inside counts, so enclose the backward pass as well."""
    global _strict
    before, _strict = _strict, enabled
    try:
        yield
    finally:
        _strict = before


def record_mixed_product(left: str, right: str) -> None:
    """Count a product of two formats, of which one is not quantized or cannot be contracted as stored."""
    reason = f"there is no kernel for {left} by {right}"
    record(Choice("scaled_gemm", EMULATION, (("native", reason), ("triton", reason)), fallback=True), strict=False)


def gemm_counts() -> dict[tuple[str, str], int]:
    """Return how often each (operation, rung) ran; calls inside a compiled CPU graph are not counted."""
    return dict(_counts)


def reset_gemm_counts() -> None:
    """Forget all counts and warnings."""
    _counts.clear()
    _warned.clear()
