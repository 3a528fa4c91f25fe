"""Sequential: extra inputs and outputs, modules among operations, changes of the list, recomputation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_models.layers import Linear, ops
from tests.layers.te.ops.steps import NAMES, assert_equal, step


def test_extra_inputs_and_outputs_keep_their_order() -> None:
    first = ops.MakeExtraOutput(), ops.ConstantScale(2.0), ops.AddExtraInput()
    model = ops.Sequential(*first, nn.Softplus(), ops.MakeExtraOutput(), ops.AddExtraInput())

    def formula(x, a, b):
        y = F.softplus(2 * x + a)
        return y + b, x * 1, y * 1

    inputs = [torch.randn(3, 4) for _ in range(3)]
    assert_equal(step(model, None, inputs, run=formula), step(model, None, inputs))


def test_extra_inputs_that_no_operation_takes_are_refused() -> None:
    x = torch.randn(2, 4)
    for model in (ops.Sequential(ops.Identity()), ops.Identity()):
        with pytest.raises(ValueError, match="1 extra inputs were given; the operations take 0"):
            model(x, x)
    with pytest.raises(ValueError, match="0 extra inputs were given; the operations take 1"):
        ops.Sequential(nn.Identity(), ops.AddExtraInput())(x)


def test_what_is_no_tensor_is_refused() -> None:
    x = torch.randn(5, 8)
    with pytest.raises(TypeError, match="extra input 1 of operations is a list; allowed: a tensor"):
        ops.GroupedLinear(2, 8, 4)(x, [2, 3])
    with pytest.raises(TypeError, match="the input of operations is a tuple; allowed: a tensor"):
        ops.Sequential(ops.Sequential(ops.MakeExtraOutput()), ops.SiLU())(x)


def test_slices_sums_and_products_are_of_the_same_kind() -> None:
    model = ops.Sequential(ops.SiLU(), ops.ConstantScale(2.0), recompute=True)
    more, foreign = ops.Sequential(ops.AddExtraInput()), nn.Sequential(nn.Tanh())
    x = torch.randn(2, 4, requires_grad=True)
    for found, extra in ((model[:1], ()), (model + more, (x,)), (2 * model, ()), (model + foreign, ())):
        assert type(found) is ops.Sequential and found.recompute
        expected = x
        for module in found:
            expected = module(expected, *(extra if isinstance(module, ops.AddExtraInput) else ()))
        torch.testing.assert_close(found(x, *extra), expected)
    assert model[0] is (model + more)[0]
    with pytest.raises(ValueError, match="only objects of Sequential class"):
        model + nn.ModuleList()


def test_results_do_not_alias_inputs_or_each_other() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    y, extra = ops.Sequential(ops.Identity(), ops.MakeExtraOutput())(x)
    with torch.no_grad():
        y.zero_()
    assert torch.count_nonzero(extra) == 8 and torch.count_nonzero(x) == 8


@pytest.mark.parametrize("frozen", ["all", "linear", "input"])
def test_gradients_only_where_they_are_wanted(frozen: str) -> None:
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 4), ops.SiLU())
    model.requires_grad_(frozen != "all")
    model[1].requires_grad_(frozen == "input")
    x = torch.randn(3, 8, requires_grad=frozen != "input")
    y = model(x)
    assert y.requires_grad == (not (frozen == "all" and not x.requires_grad))
    y.sum().backward()
    assert (x.grad is None) == (frozen == "input") and (model[0].weight.grad is None) == (frozen == "all")
    assert (model[1].linear.weight.grad is None) == (frozen != "input")


def test_a_changed_list_is_grouped_anew() -> None:
    model = ops.Sequential(ops.Linear(8, 8))
    nn.init.ones_(model[0].bias)
    x = torch.randn(2, 8)
    before = model(x)
    model.append(ops.ConstantScale(3.0))
    assert torch.equal(model(x), 3 * before)
    without = copy.deepcopy(model)
    without[0].bias = None
    assert torch.equal(without(x), F.linear(x, model[0].linear.weight) * 3)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].linear.weight.zero_()
    assert torch.equal(model(x), 3 * before) and torch.equal(twin(x), torch.full_like(x, 3.0))


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_linear_equals_the_module(name: str | None) -> None:
    operation, module = ops.Linear(96, 48), Linear(96, 48)
    with torch.no_grad():
        operation.bias.normal_()
    module.load_state_dict({"weight": operation.linear.weight, "bias": operation.bias})
    x = torch.randn(2, 20, 96)
    assert_equal(step(module, name, [x]), step(operation, name, [x]))
    # the gradient's scale is the next region's business, and the second step was one
    assert_equal([module.fp8_scale[:2]], [operation.linear.fp8_scale[:2]])


@pytest.mark.parametrize("name", [None, "delayed", "nvfp4"], ids=str)
def test_recomputation_repeats_the_first_run(name: str | None) -> None:
    model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Dropout(0.5), ops.Linear(64, 64))
    x = torch.randn(33, 64)
    kept: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        def pack(t: torch.Tensor) -> torch.Tensor:
            kept.append(t.numel())
            return t

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return model(x)

    plain = step(model, name, [x], run=run)
    of_plain, state = sum(kept), [m.fp8_amax.clone() for m in (model[1].linear, model[4].linear)]
    kept.clear()
    model.recompute = True
    assert_equal(plain, step(model, name, [x], run=run))
    assert_equal(state, [m.fp8_amax for m in (model[1].linear, model[4].linear)])
    assert sum(kept) < of_plain / 4


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"], ids=str)
def test_saved_tensor_hooks_around_a_whole_step(name: str | None) -> None:
    """Backward pass included, in which norms and activations are differentiated."""
    model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.L2Norm(), ops.Linear(64, 64))
    x, packed = torch.randn(33, 64), []
    expected = step(model, name, [x])
    with torch.autograd.graph.save_on_cpu():
        assert_equal(expected, step(model, name, [x]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        assert_equal(expected, step(model, name, [x]))
    assert len(packed) > 5
