"""Collectives on two ranks, eagerly and compiled."""

import copy

import pytest
import torch
import torch.distributed as dist

from te_models.layers import ops
from tests.ranks import everyones, on_ranks

KINDS = {"gather": ops.AllGather, "scatter": ops.ReduceScatter, "reduce": ops.AllReduce}


@on_ranks(2)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients(name: str, mode: str) -> None:
    """Of `3 collective(2 x)`, on ranks with different x and gradients."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = ops.Sequential(ops.ConstantScale(2.0), KINDS[name](dist.new_group([0, 1])), ops.ConstantScale(3.0))
    model = copy.deepcopy(model)  # a group of its own cannot be copied, its name can
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if mode == "compiled" else model
    own = torch.randn(4, 3, requires_grad=True)
    y = run(own)
    gradient = torch.randn(y.shape)
    y.backward(gradient)
    x, dy = everyones(own.detach()), everyones(gradient)
    part = slice(2 * rank, 2 * rank + 2)
    expected = {
        "gather": (6 * torch.cat(x), 6 * (dy[0] + dy[1])[4 * rank : 4 * rank + 4]),
        "scatter": (6 * (x[0] + x[1])[part], 6 * torch.cat(dy)),
        "reduce": (6 * (x[0] + x[1]), 6 * dy[rank]),
    }
    torch.testing.assert_close(y.detach(), expected[name][0])
    torch.testing.assert_close(own.grad, expected[name][1])
