"""What torch.compile makes of a model: graphs, breaks, and what is compiled again and why.

The graphs are traced and differentiated but not lowered (backend "aot_eager"): the questions are the same, the answers
come in seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from te_models.layers import Recipe, autocast

from .model import GPTModel


def compile_report(model: GPTModel, recipe: Callable[[], Recipe] | None = None) -> dict[str, Any]:
    """Call a compiled model in the ways that a run does and say what each made the compiler do.

    recipe: makes the recipe anew for each call, as programs do; None: high precision. Returns JSON values: "calls"
    in order, each with the number of graphs it compiled and the reasons for compiling again; "graphs" in all; "breaks"
    by reason. The gradients of the model are dropped.
    """
    longest = model.config.max_position_embeddings
    calls = [
        ("train step", True, (2, min(32, longest))),
        ("the same again, with an equal but new recipe", True, (2, min(32, longest))),
        ("train step, another length", True, (2, min(48, longest))),
        ("train step, another batch and length", True, (3, min(20, longest))),
        ("evaluation without gradients", False, (2, min(32, longest))),
        ("evaluation, another batch and length", False, (3, min(40, longest))),
    ]
    with _compiler() as run, _kept_mode(model):
        compiled = torch.compile(model, backend="aot_eager")
        rows = []
        for name, training, shape in calls:
            ids = torch.randint(model.config.vocab_size, shape, device=next(model.parameters()).device)
            model.train(training)
            before = len(run())
            with (
                torch.set_grad_enabled(training),
                autocast(recipe is not None, recipe=None if recipe is None else recipe()),
            ):
                loss = compiled(ids, labels=ids, return_logits=False).loss
            if training:
                loss.backward()
                model.zero_grad()
            new = run()[before:]
            rows.append({"call": name, "shape": list(shape), "graphs": len(new), "reasons": [r for r in new if r]})
        breaks = {str(reason): count for reason, count in counters["graph_break"].items()}
        return {"calls": rows, "graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


@contextlib.contextmanager
def _compiler() -> Iterator[Callable[[], list[str]]]:
    """Start with an empty compiler; give a function that returns, for each frame compiled, why it was not the first."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()

    def compiled() -> list[str]:
        frames = [m for m in get_compilation_metrics() if m.is_forward is not False and m.co_name]
        return [" ".join((m.recompile_reason or "").split()) for m in frames]

    try:
        yield compiled
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def _kept_mode(model: torch.nn.Module) -> Iterator[None]:
    before = model.training
    try:
        yield
    finally:
        model.train(before)
