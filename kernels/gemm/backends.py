"""Which implementation (backend) of an operation runs, why, and how often: no silent fallback.

An operation lists its backends, fastest first, with the reason for each one it passes over. The last one, the
emulation, multiplies dequantized operands. On CPU that is the intended way. On an accelerator it is a fallback: it
warns once per reason, is counted, and is an error where the caller is strict.
"""

import contextlib
import functools
import importlib.util
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from te_models.child_process import renew_in_forks

from ..compiling import compiling
from ..torch_versions import constant_when_traced

EMULATION = "emulation"


class DeviceCapability(NamedTuple):
    """What decides: device type, compute capability, whether Triton has a build, the CUDA version of torch."""

    type: str
    capability: tuple[int, int] = (0, 0)
    triton: bool = False
    cuda: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return self.type if self.type != "cuda" else f"compute capability {self.capability[0]}.{self.capability[1]}"


def hardware(device: torch.device) -> DeviceCapability:
    """Describe a device."""
    # not cached for a CPU: the compiler traces this there, and does not trace caches
    return DeviceCapability(device.type) if device.type != "cuda" or torch.version.cuda is None else _cuda(device)


@functools.cache
def _cuda(device: torch.device) -> DeviceCapability:
    assert torch.version.cuda is not None
    major, minor = torch.version.cuda.split(".")[:2]
    triton = importlib.util.find_spec("triton") is not None
    return DeviceCapability("cuda", torch.cuda.get_device_capability(device), triton, (int(major), int(minor)))


def in_plain_torch(device: torch.device) -> bool:
    """Whether scaled GEMMs on this device are plain torch that the compiler sees, rather than registered ops."""
    return device.type == "cpu"


class BackendChoice(NamedTuple):
    """The backend that runs, and those passed over for it with a reason each."""

    operation: str
    backend: str
    passed_over: tuple[tuple[str, str], ...] = ()
    fallback: bool = False

    def __str__(self) -> str:
        reasons = "".join(f"; not {backend}: {reason}" for backend, reason in self.passed_over)
        return f"{self.operation} runs as {self.backend}{reasons}"


def first_possible(
    operation: str, backends: tuple[tuple[str, str | None], ...], *, last: str = EMULATION, fallback: bool
) -> BackendChoice:
    """Return the first backend without a reason against it, else `last`, which is a fallback where so said."""
    passed_over: list[tuple[str, str]] = []
    for backend, reason in backends:
        if reason is None:
            return BackendChoice(operation, backend, tuple(passed_over))
        passed_over.append((backend, reason))
    return BackendChoice(operation, last, tuple(passed_over), fallback)


_counts: Counter[tuple[str, str]] = Counter()
_traced: Counter[tuple[str, str]] = Counter()
_warned: set[str] = set()
_counting = threading.Lock()  # threads count at once, and adding one is a reading and a writing
renew_in_forks(_counting)


class _OfThread(threading.local):
    """regions: what the `strict_gemms` regions of this thread say that are open; now: what the innermost says."""

    def __init__(self) -> None:
        self.regions: list[list[bool]] = []
        self.now: bool | None = None


_STRICT = _OfThread()
_open: list[list[bool]] = []  # the regions of all threads


def record_choice(choice: BackendChoice, *, strict: bool) -> None:
    """Count a choice. A last backend raises ValueError when strict; where it is a fallback it warns once per reason."""
    if (strict and choice.backend == EMULATION) or (choice.fallback and _strict_now()):
        raise ValueError(f"{choice}; strict asks for a GEMM on the quantized numbers themselves")
    if torch.compiler.is_compiling() and compiling():
        if choice.fallback:
            _traced_fallback(choice.operation, choice.backend, str(choice))
        return
    with _counting:
        _counts[choice.operation, choice.backend] += 1
    if choice.fallback:
        _warn_once(str(choice))


def _strict_now() -> bool:
    """Whether the innermost region of this thread says so; in a backward pass, whether a region of any thread does,
    because autograd runs it in a thread per GPU that has no regions."""
    if _STRICT.now is not None or compiling():
        return bool(_STRICT.now)
    return torch._C._current_graph_task_id() != -1 and any(enabled for (enabled,) in tuple(_open))


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


@constant_when_traced
def _traced_fallback(operation: str, backend: str, message: str) -> bool:
    """Count a fallback that the compiler has just put into a graph. It runs while tracing, once, and not in the graph:
    what a graph replays, perhaps as a CUDA graph, no Python sees."""
    _traced[operation, backend] += 1
    _warn_once(message)
    return True


@contextlib.contextmanager
def strict_gemms(enabled: bool = True) -> Iterator[None]:
    """Inside, a GEMM on an accelerator that would fall back raises ValueError instead of warning once. What runs inside
    in this thread counts. So do backward passes; autograd may run them in other threads, so enclose them as well."""
    of_thread, region = _STRICT, [enabled]
    opened = of_thread.regions
    opened.append(region)
    _open.append(region)
    of_thread.now = enabled
    try:
        yield
    finally:
        for regions in (opened, _open):
            regions[:] = [other for other in regions if other is not region]
        of_thread.now = of_thread.regions[-1][0] if of_thread.regions else None


def record_mixed_product(operation: str, left: str, right: str) -> None:
    """Count a product of two formats, of which one is not quantized or cannot be contracted as stored."""
    reason = f"there is no kernel for {left} by {right}"
    record_choice(
        BackendChoice(operation, EMULATION, (("native", reason), ("triton", reason)), fallback=True), strict=False
    )


def gemm_counts() -> dict[tuple[str, str], int]:
    """Return how often each (operation, backend) ran. Not counted: calls that a compiled graph holds as plain torch
    (see `traced_fallbacks`), and those that a CUDA graph replays."""
    return dict(_counts)


def traced_fallbacks() -> dict[tuple[str, str], int]:
    """Return how often each (operation, backend) that is a fallback was put into a compiled graph: at least once for
    each place in each graph (the compiler may trace a place again), however often the graph runs."""
    return dict(_traced)


def reset_gemm_counts() -> None:
    """Forget all counts and warnings."""
    _counts.clear()
    _traced.clear()
    _warned.clear()
