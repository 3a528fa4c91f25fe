"""Grouped linear operations: the module's numbers, and the experts' MLP in one step."""

import pytest
import torch
from torch._dynamo.utils import counters

from te_models.layers import GroupedLinear, ops
from te_models.layers.te.ops.fused import ForwardGroupedMLP
from tests.compare import refused
from tests.layers.te.ops.steps import NAMES, assert_equal, step

SPLITS = torch.tensor([20, 0, 13])


@pytest.mark.parametrize("single", [True, False], ids=["grouped", "per_gemm"])
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_operation_equals_the_module(name: str | None, single: bool) -> None:
    operation = ops.GroupedLinear(3, 64, 48, bias=True, single_grouped_weight=single)
    module = GroupedLinear(3, 64, 48, bias=True, single_grouped_weight=single)
    with torch.no_grad():
        for parameter_name, parameter in operation.named_parameters():
            if parameter_name.startswith("bias"):
                parameter.normal_()
    module.load_state_dict(operation.state_dict())
    x = torch.randn(33, 64)
    expected = step(module, name, [x, SPLITS])
    assert len(expected) == (4 if single else 8)
    assert_equal(expected, step(operation, name, [x, SPLITS]))
    refused(lambda: operation(x, SPLITS[:2]), "m_splits has shape")


@pytest.mark.parametrize("single", [True, False], ids=["grouped", "per_gemm"])
def test_the_bias_of_each_row_is_scaled(single: bool) -> None:
    """Three rows lie past the last group."""
    layer = ops.GroupedLinear(3, 64, 48, bias=True, single_grouped_weight=single, scale_bias=True)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias"):
                parameter.normal_()
    x, scales, splits = torch.randn(33, 64), torch.rand(33), torch.tensor([20, 0, 10])

    def formula(x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        weights, biases = layer.members()
        weight, bias = (t[0] if single else torch.stack(t) for t in (weights, biases))
        parts = zip(x.split([20, 0, 13]), scales.split([20, 0, 13]), weight, bias, strict=True)
        y = torch.cat([rows @ w.T + s[:, None] * b for rows, s, w, b in parts])
        return torch.where(torch.arange(33)[:, None] < 30, y, 0)

    got, expected = step(layer, None, [x, splits, scales]), step(layer, None, [x, splits, scales], run=formula)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_equal(got, step(ops.Sequential(layer), None, [x, splits, scales]))
    assert ops.GroupedLinear(3, 64, 48, bias=False, scale_bias=True).NUM_EXTRA_INPUTS == 1
    refused(lambda: layer(x, splits, scales[:, None]), "the scales of the bias have shape (33, 1); allowed: (33,)")


def experts() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.GroupedLinear(3, 64, 96, bias=False), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 48, 64, bias=True)
    )


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"], ids=str)
def test_grouped_mlp_is_fused_and_changes_no_bit(name: str | None, monkeypatch) -> None:
    model = experts()
    (fuser,) = model.groups()
    assert [type(part) for part, _, _ in fuser.forward_parts] == [ForwardGroupedMLP]
    monkeypatch.setattr("te_models.layers.te.ops.fused.FUSIONS", [])
    apart = ops.Sequential(*model)
    inputs = [torch.randn(33, 64), SPLITS, torch.rand(33), SPLITS]
    assert_equal(step(apart, name, inputs), step(model, name, inputs))


def test_each_gemm_may_have_splits_of_its_own() -> None:
    model, other = experts(), torch.tensor([3, 30, 0])
    x, p = torch.randn(33, 64), torch.rand(33)
    hidden = model[1](model[0](x, SPLITS), p)
    torch.testing.assert_close(model(x, SPLITS, p, other), model[2](hidden, other), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_experts_compile_to_one_graph_for_all_splits(name: str | None) -> None:
    model = experts()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (40, 33):
        splits = torch.tensor([rows - 3, 0, 3])
        inputs = [torch.randn(rows, 64), splits, torch.rand(rows), splits]
        assert_equal(step(model, name, inputs), step(model, name, inputs, run=compiled))
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
