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

from ..torch_versions import constant_when_traced

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
_traced: Counter[tuple[str, str]] = Counter()
_warned: set[str] = set()
_strict = False


def record(choice: Choice, *, strict: bool) -> None:
    """Count a choice. A last rung raises ValueError when strict; where it is a fallback it warns once per reason."""
    if (strict and choice.rung == EMULATION) or (_strict and choice.fallback):
        raise ValueError(f"{choice}; strict asks for a GEMM on the quantized numbers themselves")
    if torch.compiler.is_compiling():
        if choice.fallback:
            _traced_fallback(choice.operation, choice.rung, str(choice))
        return
    _counts[choice.operation, choice.rung] += 1
    if choice.fallback:
        _warn_once(str(choice))


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


@constant_when_traced
def _traced_fallback(operation: str, rung: str, message: str) -> bool:
    """Count a fallback that the compiler has just put into a graph. It runs while tracing, once, and not in the graph:
    what a graph replays, perhaps as a CUDA graph, no Python sees."""
    _traced[operation, rung] += 1
    _warn_once(message)
    return True


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


def record_mixed_product(operation: str, left: str, right: str) -> None:
    """Count a product of two formats, of which one is not quantized or cannot be contracted as stored."""
    reason = f"there is no kernel for {left} by {right}"
    record(Choice(operation, EMULATION, (("native", reason), ("triton", reason)), fallback=True), strict=False)


def gemm_counts() -> dict[tuple[str, str], int]:
    """Return how often each (operation, rung) ran. Not counted: calls that a compiled graph holds as plain torch (see
    `traced_fallbacks`), and those that a CUDA graph replays."""
    return dict(_counts)


def traced_fallbacks() -> dict[tuple[str, str], int]:
    """Return how often each (operation, rung) that is a fallback was put into a compiled graph: at least once for each
    place in each graph (the compiler may trace a place again), however often the graph runs."""
    return dict(_traced)


def reset_gemm_counts() -> None:
    """Forget all counts and warnings."""
    _counts.clear()
    _traced.clear()
    _warned.clear()
