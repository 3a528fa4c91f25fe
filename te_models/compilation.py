"""One way to compile a model, and what it sets.

Models compile as they are: `torch.compile(model, fullgraph=True)` gives one graph. This helper names the choices that
matter and makes them explicit.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from .model import GPTModel

Scope = Literal["model", "layers"]


def compile_model(
    model: GPTModel, *, scope: Scope = "model", dynamic: bool | None = None, backend: str = "inductor"
) -> GPTModel:
    """Compile `model` in place and return it; parameter names do not change.

    scope "model" makes one graph of a whole call: the fastest steps, and a compile time that grows with the number of
    layers. "layers" compiles one layer, which all equal layers share: compile time of one layer, the rest is eager.
    dynamic: None compiles for the first shape and once more, for all shapes, when it changes; True for all shapes at
    once; False anew for each shape. Always fullgraph: what cannot be one graph is an error, not a slow path.
    """
    if scope not in get_args(Scope):
        raise ValueError(f"scope is {scope!r}; allowed: {', '.join(map(repr, get_args(Scope)))}")
    modules: list[torch.nn.Module] = [model] if scope == "model" else list(model.decoder.layers)
    for module in modules:
        module.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    return model
