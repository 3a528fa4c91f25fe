"""Graphs, recompilations and bits of layers under each recipe, as one line of JSON; with "absent" where torch cannot
register constants of graphs, as 2.11.

    python -m tests.layers.registered.graphs_of_recipes [absent] [recipe ...]
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any


def without_registration() -> None:
    """Take away what registers constants of graphs, before te_models is imported."""
    import torch._dynamo
    import torch._library.opaque_object as opaque

    if torch.distributed.is_available():
        import torch.distributed.tensor  # registers classes of its own

    for name in ("register_opaque_type", "register_custom_class"):
        if hasattr(opaque, name):
            delattr(opaque, name)


def graphs(name: str) -> dict[str, Any]:
    """Run a layer under a recipe eagerly and compiled, with equal recipes made again, other rows and another recipe."""
    import torch
    from torch._dynamo.utils import counters

    import te_models.layers as te

    torch.compiler.reset()
    torch.manual_seed(0)
    layer = te.Linear(64, 64)
    counters.clear()
    te.set_rounding_seed(layer, 1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    digest, counts = hashlib.sha256(), []
    x = torch.randn(96, 64)
    for rows, fields in ((48, {}), (48, {}), (96, {}), (48, {"backward_override": "dequantized"})):
        part = x[:rows].clone().requires_grad_()
        with te.autocast(recipe=te.recipe(name, **fields)):
            y = compiled(part)
        layer.zero_grad()
        y.square().sum().backward()
        counts.append(counters["stats"]["unique_graphs"])
        for tensor in (y, part.grad, layer.weight.grad):
            digest.update(tensor.detach().numpy().tobytes())
    quantizer = te.recipe(name).weight_quantizer()
    stored = torch.compile(lambda x, q: q.quantize(x), fullgraph=True, backend="aot_eager")(x, quantizer)
    same = all(
        torch.equal(a, b) for a, b in zip(stored.fields.values(), quantizer.quantize(x).fields.values(), strict=True)
    )
    return {"graphs": counts, "digest": digest.hexdigest(), "same": same}


def main(arguments: list[str]) -> None:
    absent = "absent" in arguments
    if absent:
        without_registration()
    from te_models.kernels.torch_versions import register_constants

    assert (register_constants is None) == absent
    print(json.dumps({name: graphs(name) for name in arguments if name != "absent"}))


if __name__ == "__main__":
    main(sys.argv[1:])
