"""Part 4: every module, forward and backward, under every recipe, against the same module on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from .setting import Setting, untimed_tiles
from .subjects import KINDS, Subject, compare, pairs, step

_CPU = torch.device("cpu")


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each module under each recipe."""
    if not setting.rehearse:
        untimed_tiles(in_turn=True)
    made = cache(partial(Subject, small=setting.rehearse))
    for kind, recipe in pairs(tuple(KINDS), setting.rehearse, ("mxfp8",)):
        yield f"{kind} under {recipe}", partial(check, setting, made, kind, recipe)


def check(setting: Setting, made: Callable[[str], Subject], kind: str, recipe: str) -> dict[str, Any]:
    """Run both; the CPU a second time with weights that are a rounding off."""
    subject = made(kind)
    module, inputs = subject.on(setting.device)
    with setting.on_device():
        found = step(module, inputs, recipe)
        setting.synchronize()
    module, inputs = subject.on(_CPU)
    want = step(module, inputs, recipe)
    return compare(found, want, subject.moved(lambda nudged: step(nudged, inputs, recipe), want))
