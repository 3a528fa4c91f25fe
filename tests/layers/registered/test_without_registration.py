"""A torch that cannot register constants of graphs compiles the same graphs, with the same bits."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest

from te_models.kernels.torch_versions import register_constants


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
    again = quantizer.quantize(x).fields.values()
    same = all(torch.equal(a, b) for a, b in zip(stored.fields.values(), again, strict=True))
    return {"graphs": counts, "digest": digest.hexdigest(), "same": same}


def main(arguments: list[str]) -> None:
    absent = "absent" in arguments
    if absent:
        without_registration()
    from te_models.kernels.torch_versions import register_constants

    assert (register_constants is None) == absent
    print(json.dumps({name: graphs(name) for name in arguments if name != "absent"}))


RECIPES = ["mxfp8", "current", "block", "delayed", "nvfp4"]


def run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.layers.registered.test_without_registration", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(register_constants is None, reason="this torch has no constants of graphs to take away")
def test_the_package_works_where_the_registration_is_absent() -> None:
    assert run("absent") == {}


@pytest.mark.slow
@pytest.mark.skipif(register_constants is None, reason="this torch has no constants of graphs to take away")
def test_the_same_graphs_and_bits_without_registration() -> None:
    found, expected = run("absent", *RECIPES), run(*RECIPES)
    assert found == expected
    for name, counted in found.items():  # rows and recipes made again: one graph; another recipe: one more
        assert counted["graphs"] == [1, 1, 1, 2] and counted["same"], name


if __name__ == "__main__":
    main(sys.argv[1:])
