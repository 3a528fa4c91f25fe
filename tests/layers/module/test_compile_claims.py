"""What is promised of quantizers and recipes under the compiler, one test per promise."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import te_models.layers as te
from te_models.layers.quantizer import Quantizer
from te_models.layers.quantizer.delayed import Float8Quantizer
from tests.build import weight_quantizers
from tests.compare import refused, same_bits
from tests.layers.quantizer.examples import DELAYED, EXAMPLES
from tests.layers.quantizer.test_values import WithGroup


@pytest.mark.parametrize("name", [*EXAMPLES, "delayed"])
def test_quantizer_returned_from_a_fullgraph_function(name: str) -> None:
    quantizer = (EXAMPLES | {"delayed": DELAYED})[name]

    def same(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Quantizer]:
        return x + len(quantizer.field_names()), quantizer

    counter = CompileCounter()
    compiled = torch.compile(same, backend=counter, fullgraph=True)
    for again in (quantizer, copy.deepcopy(quantizer)):
        y, returned = compiled(torch.zeros(1), again)
        assert y.item() == len(quantizer.field_names())
        assert returned == quantizer and type(returned) is type(quantizer)
    assert counter.frame_count == 1


def test_process_group_on_a_quantizer_refused() -> None:
    """And with it all live state, declared or not, in a quantizer or one inside it: a graph cannot hold it."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    for held in (group, torch.ones(3)):
        quantizer = te.MXFP8Quantizer()
        object.__setattr__(quantizer, "two_dimensional", held)
        with pytest.raises(TypeError, match=rf"two_dimensional is a {type(held).__name__}, live state"):
            quantizer.__fx_repr__()
        undeclared = te.MXFP8Quantizer()
        object.__setattr__(undeclared, "group", held)
        refused(undeclared.__fx_repr__, "MXFP8Quantizer.group is a", error=TypeError)
    inside = te.HybridQuantizer(rowwise_quantizer=WithGroup(group=group))
    refused(inside.__fx_repr__, "WithGroup.group is a ProcessGroup", error=TypeError)
    with pytest.raises(TypeError, match="holds live tensors"):
        Float8Quantizer(torch.ones(()), None, torch.float8_e4m3fn).__fx_repr__()


_BY_INDUCTOR = [pytest.param(n, "inductor", marks=pytest.mark.slow) for n in weight_quantizers()]


@pytest.mark.sentinels("float8-aot_eager", "mxfp8_2d-aot_eager", "identity-aot_eager")
@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in weight_quantizers()), *_BY_INDUCTOR])
def test_fp8_output_keeps_its_quantizer_through_the_compiled_path(name: str, backend: str) -> None:
    """A quantized tensor that a graph makes comes out with the quantizer that made it, and can be used as such."""
    quantizer = weight_quantizers()[name]

    def make(x: Tensor) -> tuple[te.QuantizedTensor, te.QuantizedTensor]:
        made = quantizer.quantize(x * 2)
        return made, made.clone()

    for made in torch.compile(make, fullgraph=True, backend=backend)(torch.randn(32, 48)):
        assert made.quantizer == quantizer and type(made.quantizer) is type(quantizer)
        assert same_bits(quantizer.quantize(torch.ones(32, 48)), made.copy_(torch.ones(32, 48)))


def formats(quantizer: Quantizer, seen: list[str], name: str) -> Any:
    def factory(role: Any) -> Quantizer:
        seen.append(f"{name} {role.tensor_type}")
        return quantizer

    return factory


@pytest.mark.sentinels("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_nested_autocast_with_two_custom_recipes_uses_each_ones_factory(compiled: bool) -> None:
    """Both are instances of one class: quantizers belong to the recipe, not to its class."""
    layer = te.Linear(64, 32, bias=False)
    x = torch.randn(8, 64)
    kinds = {"outer": te.MXFP8Quantizer(), "inner": te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)}
    alone = {}
    for name, quantizer in kinds.items():
        with te.autocast(recipe=te.CustomRecipe(qfactory=lambda role, quantizer=quantizer: quantizer)):
            alone[name] = layer(x)
    assert not torch.equal(alone["outer"], alone["inner"])
    seen: list[str] = []
    recipes = {name: te.CustomRecipe(qfactory=formats(quantizer, seen, name)) for name, quantizer in kinds.items()}
    run = torch.compile(lambda x: layer(x), fullgraph=True, backend="aot_eager") if compiled else layer
    for _ in range(2):
        with te.autocast(recipe=recipes["outer"]):
            first = run(x)
            with te.autocast(recipe=recipes["inner"]):
                second = run(x)
            third = run(x)
        assert torch.equal(first, alone["outer"]) and torch.equal(second, alone["inner"])
        assert torch.equal(third, alone["outer"])
    assert {who.split()[0] for who in seen} == {"outer", "inner"}


def reachable(roots: list[Any]) -> list[Any]:
    """All that these refer to, but not by way of classes, modules and functions, whose globals lead everywhere."""
    found: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        item = pending.pop()
        if id(item) in found or isinstance(item, (type, type(torch), nn.Module, type(reachable))):
            continue
        found[id(item)] = item
        pending += gc.get_referents(item)
    return list(found.values())


LAYERS = {
    "Linear": lambda: te.Linear(32, 32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 32, bias=False),
}


def nodes_of(y: Tensor) -> list[Any]:
    """The functions of y's autograd graph."""
    found: dict[Any, None] = {}
    pending = [y.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found[node] = None
            pending += [next_node for next_node, _ in node.next_functions]
    return list(found)


@pytest.mark.parametrize(
    "recipe", [te.MXFP8BlockScaling(), te.NVFP4BlockScaling()], ids=lambda recipe: type(recipe).__name__
)
@pytest.mark.parametrize("name", LAYERS)
def test_recipe_never_shipped_to_backward(name: str, recipe: te.Recipe) -> None:
    """What autograd keeps between the passes names the formats of the operands, not the recipe they came from."""
    layer, x = LAYERS[name](), torch.randn(32, 32, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = layer(x, torch.tensor([16, 16])) if name == "GroupedLinear" else layer(x)
    nodes = [node for node in nodes_of(y) if hasattr(node, "saved_tensors")]
    kept = reachable([vars(node) for node in nodes])
    assert any(isinstance(item, Quantizer) for item in kept), "nothing of the layer's own was found"
    assert not [item for item in kept if isinstance(item, te.Recipe)]
