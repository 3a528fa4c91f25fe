"""Part 5: full graphs of a layer, of experts and of models under every recipe, against the same device without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from .setting import Setting, untimed_tiles
from .subjects import Subject, compare, pairs, step

_KINDS = ("Linear", "GroupedLinear", "GPT dense", "GPT MoE")


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each subject under each recipe."""
    if not setting.rehearse:
        untimed_tiles(in_turn=True)
    made = cache(partial(Subject, small=setting.rehearse))
    for kind, recipe in pairs(_KINDS, setting.rehearse, ("bf16", "mxfp8")):
        yield f"{kind} under {recipe}", partial(check, setting, made, kind, recipe)


def check(setting: Setting, made: Callable[[str], Subject], kind: str, recipe: str) -> dict[str, Any]:
    """Compile the module whole, which an interruption of its graph makes an error, and run it three times."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    subject = made(kind)
    module, inputs = subject.on(setting.device)
    want = step(module, inputs, recipe)
    moved = subject.moved(lambda nudged: step(nudged.to(setting.device), inputs, recipe), want)
    module, inputs = subject.on(setting.device)
    run = torch.compile(module, fullgraph=True, backend=setting.backend)
    begun = time.perf_counter()
    found = step(module, inputs, recipe, run)
    setting.synchronize()
    seconds = round(time.perf_counter() - begun, 1)
    facts = compare(found, want, moved)
    for _ in range(2):
        step(module, inputs, recipe, run)
    setting.synchronize()
    return facts | {"compile_s": seconds, "graphs": counters["stats"]["unique_graphs"]}
