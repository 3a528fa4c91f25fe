"""One comparison: the sides that do the same work, how much work it is, and what has to hold before it is timed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]


class WrongResultError(Exception):
    """A side's result is wrong, so its speed does not matter."""


@dataclass
class Case:
    """sides: functions without arguments, by name; ours among them.

    nbytes or flops: the work of one call, counted from tensors. over: for a side, those whose best time it is divided
    into. targets: for a side, the least share of the copy's bandwidth (nbytes) or speed over the others (flops). check:
    gets each side's result and raises WrongResultError. missing: peers that cannot run here, with the reason.
    """

    name: str
    sides: dict[str, Run]
    check: Callable[[dict[str, Any]], None]
    nbytes: int | None = None
    flops: float | None = None
    over: dict[str, tuple[str, ...]] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of tensors, each read or written once."""
    return sum(t.numel() * t.element_size() for t in tensors)


def installed(package: str) -> str | None:
    """Return the version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def as_tensors(result: Any) -> list[Tensor]:
    """Return a result's tensors in order."""
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in as_tensors(part)]


def same_bits(results: dict[str, Any], expected: Iterable[Tensor]) -> None:
    """Raise WrongResultError unless every side has exactly the expected tensors."""
    expected = list(expected)
    for side, result in results.items():
        for i, (found, want) in enumerate(zip(as_tensors(result), expected, strict=True)):
            integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
            differing = int((found.view(integer) != want.view(integer)).sum())
            if differing:
                raise WrongResultError(
                    f"{side}: {differing} of {want.numel()} values of result {i} are not the reference's"
                )


def near(results: dict[str, Any], base: str, limits: dict[str, float]) -> None:
    """Raise WrongResultError where |side - base| / |base| (Frobenius) exceeds the side's limit."""
    for side, limit in limits.items():
        if side not in results:
            continue
        for i, (found, want) in enumerate(zip(as_tensors(results[side]), as_tensors(results[base]), strict=True)):
            error = float((found.float() - want.float()).norm() / want.float().norm())
            if not error <= limit:
                raise WrongResultError(
                    f"{side}: result {i} is {error:.2g} from {base}'s, relatively; allowed: {limit:g}"
                )
