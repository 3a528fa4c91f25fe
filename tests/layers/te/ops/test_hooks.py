"""Hooks on operations run as on the modules of `torch.nn.Sequential`; without any, nothing is taken apart."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import prune

from te_models.layers import ops
from tests.layers.te.ops.steps import assert_equal, step


def mlp() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(96), ops.Linear(96, 128), ops.SwiGLU(), ops.Linear(64, 96))


def forward_hook(module: nn.Module, seen: list[Tensor]) -> object:
    return module.register_forward_hook(lambda _, arguments, y: seen.append(y.detach()))


def forward_pre_hook(module: nn.Module, seen: list[Tensor]) -> object:
    return module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))


def backward_hook(module: nn.Module, seen: list[Tensor]) -> object:
    return module.register_full_backward_hook(lambda _, dx, dy: seen.append(dx[0]))


def backward_pre_hook(module: nn.Module, seen: list[Tensor]) -> object:
    return module.register_full_backward_pre_hook(lambda _, dy: seen.append(dy[0]))


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"], ids=str)
@pytest.mark.parametrize("register", [forward_hook, forward_pre_hook, backward_hook, backward_pre_hook])
def test_hooks_run_and_change_no_bit(register: Callable, name: str | None) -> None:
    model, x = mlp(), torch.randn(8, 96)
    whole = model.groups()
    plain, seen = step(model, name, [x]), []
    handle = register(model[2], seen)
    assert_equal(plain, step(model, name, [x]))
    with torch.no_grad():
        up = model[1](model[0](x))
        y = model[2](up)
    (found,) = seen[:1]
    if name is None and "backward" not in register.__name__:
        assert torch.equal(found, y if register is forward_hook else up)
    else:
        assert found.shape == (y if register in (forward_hook, backward_pre_hook) else up).shape
    handle.remove()
    seen.clear()
    assert_equal(plain, step(model, name, [x]))
    assert not seen and [type(g) for g in model.groups()] == [type(g) for g in whole] == [ops.OperationFuser]


def test_a_hook_inside_of_a_linear_operation_runs() -> None:
    model, x = mlp(), torch.randn(8, 96)
    expected = model(x)
    for linear in (model[1], model):
        seen: list[Tensor] = []
        handle = forward_hook(model[1].linear, seen)
        y = linear(x)
        handle.remove()
        assert len(seen) == 1 and seen[0].shape == (8, 128)
    torch.testing.assert_close(y, expected)


def test_what_hooks_return_goes_on_with_extra_inputs_and_outputs_in_their_places() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput(), ops.AddExtraInput(), ops.ConstantScale(2.0), ops.AddExtraInput(), ops.MakeExtraOutput()
    )
    model[1].register_forward_pre_hook(lambda _, arguments: (arguments[0], 10 * arguments[1]))
    model[2].register_forward_hook(lambda _, arguments, y: -y)
    model[4].register_forward_hook(lambda _, arguments, result: (result[0] + 1, result[1]))
    inputs = [torch.randn(3, 4) for _ in range(3)]

    def formula(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = -2 * (x + 10 * a) + b
        return y + 1, x * 1, y * 1

    assert_equal(step(model, None, inputs, run=formula), step(model, None, inputs))
    with pytest.raises(ValueError, match="1 extra inputs were given; the operations take 2"):
        model(*inputs[:2])


def test_pruning_is_a_hook() -> None:
    """It computes the weight before each call: without it the operation would go on with the first one."""
    model = ops.Sequential(ops.BasicLinear(32, 16), ops.SiLU())
    prune.l1_unstructured(model[0], "weight", 0.5)
    with torch.no_grad():
        model[0].weight_orig.mul_(2)
    x = torch.randn(4, 32)
    expected = F.silu(x @ (model[0].weight_orig * model[0].weight_mask).t())
    y = model(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert torch.equal(model[0].weight_orig.grad == 0, model[0].weight_mask == 0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_hooks_are_in_the_graph(recompute: bool) -> None:
    model, x = mlp(), torch.randn(8, 96)
    model.recompute = recompute
    model[1].register_forward_hook(lambda _, arguments, y: 2 * y)
    model[2].register_forward_pre_hook(lambda _, arguments: (arguments[0] + 1,))
    expected = step(model, None, [x])
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for rows in (x, torch.cat([x, x])):
        found = step(model, None, [rows], run=compiled)
        if rows is x:
            assert_equal(expected, found)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
