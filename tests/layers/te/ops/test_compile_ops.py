"""Groups compile to one graph, forward and backward, for all shapes, and compute the same bits as eager."""

import pytest
import torch
from torch._dynamo.utils import counters

from te_models.layers import QuantizedTensor, autocast, ops, quantized_model_init, recipe
from tests.layers.te.ops.steps import NAMES, assert_equal, step


def mlp(recompute: bool = False) -> ops.Sequential:
    first = ops.MakeExtraOutput(), ops.RMSNorm(96), ops.Linear(96, 128), ops.SwiGLU()
    return ops.Sequential(*first, ops.Linear(64, 96), ops.ConstantScale(0.5), ops.AddExtraInput(), recompute=recompute)


def in_place() -> ops.Sequential:
    first = ops.Linear(96, 96), ops.AddExtraInput(in_place=True), ops.SwiGLU(glu_interleave_size=8)
    last = ops.Linear(48, 64), ops.Reshape(-1, 2, 32), ops.LayerNorm((2, 32))
    return ops.Sequential(*first, ops.Quantize(backward=True), *last)


KINDS = {
    "mlp": (mlp, 1),
    "recompute": (lambda: mlp(recompute=True), 1),
    "linear_gelu": (lambda: ops.Sequential(ops.LayerNorm(96), ops.Linear(96, 64), ops.GELU(), ops.L2Norm()), 0),
    "quantize": (lambda: ops.Sequential(ops.Quantize(), ops.BasicLinear(96, 64), ops.Bias(64), ops.Reshape(-1, 32)), 0),
    "in_place": (in_place, 1),
    "add": (lambda: ops.Sequential(ops.Linear(96, 96), ops.AddExtraInput(), ops.ClampedSwiGLU()), 1),
}
FAST = {("mlp", "delayed"), ("add", "mxfp8")}
MATRIX = [
    pytest.param(kind, name, False, marks=() if (kind, name) in FAST else pytest.mark.slow, id=f"{kind}-{name}")
    for kind in KINDS
    for name in NAMES
] + [pytest.param("mlp", name, True, marks=pytest.mark.slow, id=f"mlp-{name}-stored") for name in NAMES[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, stored", MATRIX)
def test_one_graph_for_all_shapes_and_equal_recipes(kind: str, name: str | None, stored: bool) -> None:
    build, extra_inputs = KINDS[kind]
    with quantized_model_init(enabled=stored, recipe=name and recipe(name)):
        model = build()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (40, 33, 64):
        inputs = [torch.randn(rows, 96) for _ in range(1 + extra_inputs)]
        assert_equal(step(model, name, inputs), step(model, name, inputs, run=compiled))
        assert not counters["graph_break"], dict(counters["graph_break"])
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_inductor_computes_the_same_group(name: str | None) -> None:
    """But for the order of sums, of at most 128 numbers: as many roundings to float32. (Norms and activations are
    compiled to other instructions. Were a last bit to move one of 3072 values to the next FP8 number, this would fail;
    that takes a value within 2^-22 of the middle of two, one in 2^18.)"""
    model = mlp()
    compiled = torch.compile(model, fullgraph=True)
    inputs = [torch.randn(32, 96) for _ in range(2)]
    for a, b in zip(step(model, name, inputs), step(model, name, inputs, run=compiled), strict=True):
        assert (a - b).norm() <= 128 * 2.0**-24 * a.norm()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_quantized_inputs_and_outputs_of_graphs() -> None:
    front, back = ops.Sequential(ops.SiLU(), ops.Quantize()), ops.Sequential(ops.Linear(96, 48))
    compiled = [torch.compile(m, fullgraph=True, backend="aot_eager") for m in (front, back)]
    x, results = torch.randn(32, 96), []
    for first, second in ((front, back), compiled, compiled):
        back.zero_grad()
        with autocast(recipe=recipe("mxfp8")):
            q = first(x)
            y = second(q)
        assert isinstance(q, QuantizedTensor)
        y.sum().backward()
        results.append([y.detach(), back[0].linear.weight.grad])
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.sentinels("current")
@pytest.mark.parametrize("name", NAMES[:3], ids=str)
def test_compiled_inside_of_saved_tensor_hooks(name: str | None) -> None:
    """They see what the graph saves; it is the graph of a call outside of them."""
    model, packed = mlp(), []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = [torch.randn(33, 96) for _ in range(2)]
    expected = step(model, name, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        assert_equal(expected, step(model, name, inputs, run=compiled))
    seen = len(packed)
    assert seen > 5
    assert_equal(expected, step(model, name, inputs, run=compiled))
    assert len(packed) == seen and counters["stats"]["unique_graphs"] == 1
