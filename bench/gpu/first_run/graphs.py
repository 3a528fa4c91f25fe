"""Part 8: steps that a CUDA graph captures and replays, the memory they take, and that the host never waits in one.

A rehearsal has no such device: there a step runs twice, and where this torch knows CUDA tensors without values, a
forward pass runs on them, which refuses whatever makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from te_models import layers

from .setting import Setting, untimed_tiles
from .subjects import Subject, named, pairs, step
from .worker import WrongError

_KINDS = ("GPT MoE", "GPT dense", "GroupedLinear", "Linear")
_DRAWN = ("nvfp4", "delayed")
"""Recipes whose random bits or scales differ from call to call, so that a replayed step has other numbers."""


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield both questions about each subject under each recipe."""
    if not setting.rehearse:
        untimed_tiles(in_turn=False)
    made = cache(partial(Subject, small=setting.rehearse))
    for kind, recipe in pairs(_KINDS[-1:] if setting.rehearse else _KINDS, setting.rehearse, ("bf16",)):
        if setting.rehearse:
            yield f"{kind} under {recipe}: the host waits", partial(waits_of_a_fake, made, kind, recipe)
        else:
            yield f"{kind} under {recipe}: the host waits", partial(waits, setting, made, kind, recipe)
            yield f"{kind} under {recipe}: captured", partial(captured, setting, made, kind, recipe)


def waits(setting: Setting, made: Callable[[str], Subject], kind: str, recipe: str) -> dict[str, Any]:
    """Run a step that is an error where the host waits for the device; count what memory a step takes at most."""
    module, inputs = made(kind).on(setting.device)
    step(module, inputs, recipe)  # tunes, which waits
    setting.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, inputs, recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}


def captured(setting: Setting, made: Callable[[str], Subject], kind: str, recipe: str) -> dict[str, Any]:
    """Capture a step and replay it: bit for bit what the step computes when it is called."""
    module, inputs = made(kind).on(setting.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(module, inputs, recipe)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(module, inputs, recipe)
    graph.replay()
    replayed = {name: t.clone() for name, t in found.items()}
    want = step(module, inputs, recipe)
    setting.synchronize()
    differ = [name for name in want if not torch.equal(replayed[name], want[name])]
    infinite = [name for name, t in replayed.items() if not t.float().isfinite().all()]
    if infinite or (differ and recipe not in _DRAWN):
        raise WrongError(f"a replayed step has other values than a called one: {', '.join((infinite or differ)[:5])}")
    return {"tensors": len(want)}


def waits_of_a_fake(made: Callable[[str], Subject], kind: str, recipe: str) -> dict[str, Any]:
    """Run a step twice on the CPU, and its forward pass on tensors of a GPU without values where torch has them."""
    from tests.te_models.fake_gpu import Apart, fake_gpu

    module, inputs = made(kind).on(torch.device("cpu"))
    for _ in range(2):
        step(module, inputs, recipe)
    if torch.version.cuda is None:
        return {"missing": {"tensors of a GPU without values": "this torch is built without CUDA"}}
    with fake_gpu():
        module, inputs = made(kind).on(torch.device("cuda"))
        with Apart(), layers.autocast(enabled=recipe != "bf16", recipe=named(recipe)):
            module(*inputs)
    return {}
