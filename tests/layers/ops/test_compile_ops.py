"""Groups compile to one graph, forward and backward, for all shapes, and compute the same bits as eager."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from te_models.layers import ops, quantized_model_init, recipe
from tests.layers.ops.steps import NAMES, assert_equal, step


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def mlp(recompute: bool = False) -> ops.Sequential:
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.RMSNorm(96),
        ops.Linear(96, 128),
        ops.SwiGLU(),
        ops.Linear(64, 96),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(),
        recompute=recompute,
    )


KINDS = {
    "mlp": (mlp, 1),
    "recompute": (lambda: mlp(recompute=True), 1),
    "linear_gelu": (lambda: ops.Sequential(ops.LayerNorm(96), ops.Linear(96, 64), ops.GELU(), ops.L2Norm()), 0),
    "quantize": (lambda: ops.Sequential(ops.Quantize(), ops.BasicLinear(96, 64), ops.Bias(64), ops.Reshape(-1, 32)), 0),
    "add": (lambda: ops.Sequential(ops.Linear(96, 96), ops.AddExtraInput(), ops.ClampedSwiGLU()), 1),
}
FAST = {("mlp", None), ("mlp", "delayed"), ("quantize", "mxfp8"), ("recompute", "delayed")}
MATRIX = [
    pytest.param(kind, name, False, marks=() if (kind, name) in FAST else pytest.mark.slow, id=f"{kind}-{name}")
    for kind in KINDS
    for name in NAMES
] + [pytest.param("mlp", name, True, marks=pytest.mark.slow, id=f"mlp-{name}-stored") for name in NAMES[1:]]


@pytest.mark.parametrize("kind, name, stored", MATRIX)
def test_one_graph_for_all_shapes_and_equal_recipes(kind: str, name: str | None, stored: bool) -> None:
    torch.manual_seed(0)
    build, extra_inputs = KINDS[kind]
    with quantized_model_init(enabled=stored, recipe=name and recipe(name)):
        model = build()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (40, 33, 64):
        inputs = [torch.randn(rows, 96) for _ in range(1 + extra_inputs)]
        assert_equal(step(model, name, inputs), step(model, name, inputs, run=compiled))
        assert not counters["graph_break"], dict(counters["graph_break"])
        assert counters["stats"]["unique_graphs"] == 1
