"""Fused operations: found where they fit, and the same numbers as their parts."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from te_models.layers import ops
from te_models.layers.te.ops.fused import (
    BackwardLinearAdd,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from tests.layers.te.ops.steps import assert_equal, step

CASES = {
    "bias": ([ops.Linear(32, 16)], 0, [ForwardLinearBiasActivation]),
    "bias_activation": ([ops.Linear(32, 16), ops.GELU(), ops.Linear(16, 32)], 0, [ForwardLinearBiasActivation] * 2),
    "bias_add": ([ops.Linear(32, 16), ops.AddExtraInput()], 1, [ForwardLinearBiasAdd]),
    "add": ([ops.BasicLinear(32, 16), ops.AddExtraInput()], 1, [ForwardLinearBiasAdd]),
    "scale_add": ([ops.BasicLinear(32, 16), ops.ConstantScale(0.5), ops.AddExtraInput()], 1, [ForwardLinearScaleAdd]),
    "backward_add": ([ops.RMSNorm(32), ops.MakeExtraOutput(), ops.BasicLinear(32, 16)], 0, [BackwardLinearAdd]),
}


def fused(fuser: ops.OperationFuser) -> list[type]:
    return [type(part) for part, begin, end in (*fuser.forward_parts, *fuser.backward_parts) if end - begin > 1]


@pytest.mark.parametrize("recipe_name", [None, "delayed", "mxfp8"], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fusion_is_found_and_changes_no_number(name: str, recipe_name: str | None, monkeypatch) -> None:
    modules, extra_inputs, expected = CASES[name]
    model = ops.Sequential(*modules)
    assert fused(model.groups()[0]) == expected
    monkeypatch.setattr("te_models.layers.te.ops.fused.FUSIONS", [])
    apart = ops.Sequential(*modules)
    assert fused(apart.groups()[0]) == []
    inputs = [torch.randn(24, 32), *(torch.randn(24, 16) for _ in range(extra_inputs))]
    a, b = step(apart, recipe_name, inputs), step(model, recipe_name, inputs)
    assert len(a) == len(b)
    torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


def test_a_longer_fusion_wins_and_others_are_left_alone() -> None:
    model = ops.Sequential(
        ops.Linear(8, 8), ops.AddExtraInput(), ops.BasicLinear(8, 8), ops.Bias(8), ops.SiLU(), ops.Bias(8)
    )
    (fuser,) = model.groups()
    parts = [(type(part), begin, end) for part, begin, end in fuser.forward_parts]
    assert parts == [(ForwardLinearBiasAdd, 0, 3), (ForwardLinearBiasActivation, 3, 6), (ops.Bias, 6, 7)]


def test_a_module_between_operations_ends_the_group() -> None:
    model = ops.Sequential(ops.Linear(8, 8), nn.ReLU(), ops.Bias(8), ops.SiLU())
    assert [type(g) for g in model.groups()] == [ops.OperationFuser, nn.ReLU, ops.OperationFuser]


class TwiceLinear(ops.BasicLinear):
    """y = 2 x w^T, in the form of two methods."""

    def op_forward_compute(self, x, call):
        found = super().op_forward_compute(x, call)
        return found._replace(output=2 * found.output)

    def op_forward_save_ctx(self, ctx, x, computed, call):
        super().op_forward_save_ctx(ctx, x, computed, call)

    def op_backward(self, ctx, dy, extra_gradients):
        return super().op_backward(ctx, 2 * dy, extra_gradients)


class TwiceGELU(ops.GELU):
    """2 x, in the form of one method, beside the two that it inherits."""

    def op_forward(self, ctx, x, call):
        return ops.Computed(2 * x)

    def op_backward(self, ctx, dy, extra_gradients):
        return ops.Gradients(2 * dy)


class TwiceScale(ops.ConstantScale):
    """y = 2 scale x; the backward pass takes its factor from what is saved."""

    def op_forward(self, ctx, x, call):
        ctx.constants = 2 * self.scale
        return ops.Computed(2 * self.scale * x)


class TwiceExtra(ops.MakeExtraOutput):
    """y = x; the extra output is 2 x."""

    def op_forward(self, ctx, x, call):
        return ops.Computed(x, extra_outputs=(2 * x,))

    def op_backward(self, ctx, dy, extra_gradients):
        return ops.Gradients(dy + 2 * extra_gradients[0])


OVERRIDDEN = {
    "linear": [TwiceLinear(32, 16), ops.Bias(16), ops.GELU()],
    "activation": [ops.BasicLinear(32, 16), ops.Bias(16), TwiceGELU()],
    "scale": [ops.BasicLinear(32, 16), TwiceScale(0.5), ops.AddExtraInput()],
    "extra": [TwiceExtra(), ops.BasicLinear(32, 16)],
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_subclass_with_a_pass_of_its_own_is_not_fused_away(name: str) -> None:
    """A fusion computes what the class does that it knows, not what another made of it."""
    modules = OVERRIDDEN[name]
    inputs = [torch.randn(24, 32), *([torch.randn(24, 16)] if name == "scale" else [])]
    model = ops.Sequential(*modules)

    def one_by_one(x, *extra_inputs):
        found, left = [], list(extra_inputs)
        for module in modules:
            x = module(x, *(left.pop() for _ in range(module.NUM_EXTRA_INPUTS)))
            if module.NUM_EXTRA_OUTPUTS:
                x, extra = x
                found.append(extra)
        return (x, *found) if found else x

    expected = step(model, None, inputs, run=one_by_one)
    torch.testing.assert_close(step(model, None, inputs), expected, rtol=1e-6, atol=1e-6)


class LinearScale(ops.FusedOperation):
    """A fusion of the one-method form, in both passes."""

    runs: ClassVar[list[str]] = []

    @classmethod
    def matches(cls, operations):
        return 2 if [type(o) for o in operations[:2]] == [ops.ConstantScale, ops.ConstantScale] else 0

    def fuser_forward(self, contexts, x, calls):
        self.runs.append("forward")
        return (ops.Computed(None), ops.Computed(x * (self.operations[0].scale * self.operations[1].scale)))

    def fuser_backward(self, contexts, dy, extra_gradients):
        self.runs.append("backward")
        return (ops.Gradients(dy * (self.operations[0].scale * self.operations[1].scale)), ops.Gradients(None))


def test_a_users_fusion_in_the_form_of_one_method(monkeypatch) -> None:
    monkeypatch.setattr("te_models.layers.te.ops.fused.FUSIONS", [LinearScale])
    monkeypatch.setattr(LinearScale, "runs", [])
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(-4.0))
    x = torch.randn(5)
    assert_equal(step(model, None, [x], run=lambda x: -8 * x), step(model, None, [x]))
    assert LinearScale.runs == ["forward", "backward"]
