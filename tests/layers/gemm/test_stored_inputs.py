"""Layers store their inputs in the format of the recipe for the backward pass, eager and compiled."""

import pytest
import torch
from torch import Tensor

from te_models.layers import GroupedLinear, Linear, autocast, recipe

ROWS, COLUMNS = 256, 128
BYTES = {
    ("dense", "delayed"): 1.0,
    ("dense", "current"): 1.0,
    ("dense", "block"): 1 + 4 / 128,
    ("dense", "mxfp8"): 1 + 1 / 32,
    ("dense", "nvfp4"): 0.5 + 1 / 16,
    ("grouped", "block"): (1 + 4 / 128) * 1.5,  # 256 rows of two groups are padded to at most 384
    ("grouped", "mxfp8"): (1 + 1 / 32) * 1.25,
}


def _stored(kind: str, name: str, compiled: bool) -> float:
    """Return the bytes that are stored for an element of the input, all but parameters and small tensors."""
    torch.manual_seed(0)
    grouped = kind == "grouped"
    layer = (GroupedLinear(2, COLUMNS, 64, bias=False) if grouped else Linear(COLUMNS, 64, bias=False)).bfloat16()
    function = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else layer
    splits = (torch.tensor([100, 156]),) if grouped else ()
    x = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16).requires_grad_()
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return t

    with autocast(recipe=recipe(name)), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function(x, *splits)
    y.sum().backward()
    for p in layer.parameters():
        seen.pop(p.untyped_storage().data_ptr(), None)
    return sum(size for size in seen.values() if size > 4096 or name in ("block", "mxfp8", "nvfp4")) / x.numel()


@pytest.mark.sentinels("dense-mxfp8-compiled", *(f"{kind}-{name}-eager" for kind, name in BYTES))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("kind", "name"), BYTES)
def test_an_input_is_stored_quantized(kind: str, name: str, compiled: bool) -> None:
    indices = 0.3 if kind == "grouped" else 0.01  # where rows lie: int64, and this layer has few columns
    assert _stored(kind, name, compiled) <= BYTES[kind, name] + indices


def test_without_a_recipe_it_is_stored_as_it_is() -> None:
    layer = Linear(COLUMNS, 64, bias=False).bfloat16()
    x = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16).requires_grad_()
    seen: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(t.data_ptr()) or t, lambda t: t):
        layer(x)
    assert x.data_ptr() in seen
