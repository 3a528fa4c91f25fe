"""Part 3: the bits of every quantizer, of every stored field and back, against the recorded ones and the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.kernels.quantize import golden
from tests.kernels.triton.definitions import unequal

from .setting import Setting, untimed_tiles
from .worker import WrongError

_OF_A_REHEARSAL = 7
"""One case in so many."""


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each quantizer and input."""
    if not setting.rehearse:
        untimed_tiles(in_turn=True)
    recorded = golden.recorded()
    for at, (name, run) in enumerate(golden.cases()):
        if not setting.rehearse or at % _OF_A_REHEARSAL == 0:
            yield name, partial(check, setting, run, recorded.get(name, {}))


def check(setting: Setting, run: Callable[[torch.device], golden.Tensors], recorded: dict[str, str]) -> dict[str, Any]:
    """Compare all tensors of a case."""
    with setting.on_device():
        found = run(setting.device)
        setting.synchronize()
    want = run(torch.device("cpu"))
    wrong = [f"{name}: the CPU's own bits are not the recorded ones" for name in _not_recorded(want, recorded)]
    if found.keys() != want.keys():
        wrong.append(f"the tensors are {', '.join(found)} and should be {', '.join(want)}")
    for name in found.keys() & want.keys():
        if golden.digest(found[name]) != golden.digest(want[name]):
            wrong.append(f"{name}: {_unequal(found[name].cpu(), want[name])}")
    if wrong:
        raise WrongError("; ".join(sorted(wrong)))
    return {"tensors": len(want)}


def _not_recorded(want: golden.Tensors, recorded: dict[str, str]) -> list[str]:
    return [name for name, tensor in want.items() if recorded.get(name) != golden.digest(tensor)]


def _unequal(found: torch.Tensor, want: torch.Tensor) -> str:
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return f"it is {found.dtype} {list(found.shape)} and should be {want.dtype} {list(want.shape)}"
    return unequal(found, want) or "the signs of zeros differ"
