"""Activation checkpoints that keep some results: no bit differs, eager and compiled, and nothing kept is repeated."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import te_models.layers as te
from te_models.layers.module.model_state import quantized_modules
from tests.compare import Operations
from tests.layers.gemm.test_recomputation import everything
from tests.layers.matrix_recipes import NAMES, fresh

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
COUNTED = [*PRODUCTS, torch.ops.te_models.gemm_float32.default]
BF16 = torch.bfloat16


SAVED: dict[str, Any] = {"nothing": None, "products": PRODUCTS, "everything": everything}


class Block(nn.Module):
    """Two layers and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(64, 96, activation="swiglu", params_dtype=BF16)
        self.linear = te.Linear(64, 64, params_dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.mlp(x))


def build() -> Block:
    torch.manual_seed(0)
    block = Block()
    te.set_rounding_seed(block, 1)
    return block


def checkpointed(block: nn.Module, saved: str) -> Callable[[Tensor], Tensor]:
    contexts = functools.partial(te.recompute_contexts, SAVED[saved])
    return lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def three_steps(block: Block, run: Callable[[Tensor], Tensor], name: str | None) -> list[Tensor]:
    """Return outputs, gradients and live state of steps whose scales and random bits differ."""
    found = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(BF16).requires_grad_()
        block.zero_grad()
        with te.autocast(enabled=name is not None, recipe=fresh(name)):
            y = run(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad for p in block.parameters())]
        for _, layer in quantized_modules(block):
            found += [layer.fp8_scale.clone(), layer.fp8_rng_state.clone()]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES, ids=str)
@pytest.mark.parametrize("saved", SAVED)
def test_eagerly_a_checkpoint_changes_no_bit(saved: str, name: str | None) -> None:
    expected = three_steps(block := build(), block, name)
    got = three_steps(block := build(), checkpointed(block, saved), name)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def products_in_backward(run: Callable[[Tensor], Tensor], name: str | None) -> int:
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with te.autocast(enabled=name is not None, recipe=fresh(name)):
        loss = run(x).square().sum()
    with Operations() as reached:
        loss.backward()
    return sum(op in PRODUCTS for op in reached.found)  # those that are looked up do not reach it


@pytest.mark.parametrize("name", [None, "mxfp8", "nvfp4"])
def test_kept_products_are_not_computed_again(name: str | None) -> None:
    block = build()
    without = products_in_backward(block, name)
    assert products_in_backward(checkpointed(block, "nothing"), name) > without
    assert products_in_backward(checkpointed(block, "products"), name) == without


@pytest.mark.parametrize("saved", SAVED)
def test_statistics_are_noted_once_and_the_recomputation_goes_the_same_way(saved: str) -> None:
    """While statistics are noted, an operation hands the next one plain results instead of quantized ones."""
    found = []
    for around in (lambda block: block, lambda block: checkpointed(block, saved)):
        torch.manual_seed(0)
        block = te.ops.Sequential(te.ops.LayerNorm(64), te.ops.Linear(64, 64))
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with te.autocast(recipe=te.recipe("mxfp8")), te.collect_statistics():
            y = around(block)(x)
        noted = [layer.fp8_statistics.clone() for _, layer in quantized_modules(block)]
        y.square().sum().backward()
        assert all(torch.equal(a, layer.fp8_statistics) for a, (_, layer) in zip(noted, quantized_modules(block)))
        grads = [layer.fp8_grad_statistics for _, layer in quantized_modules(block)]
        found.append([y, x.grad, *noted, *grads, *(p.grad for p in block.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def compiled(block: Block, saved: str, name: str | None) -> tuple[list[Tensor], list[int]]:
    """Return the results of compiled steps, and how many products the forward and the backward graph have."""
    products: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        products.append(sum(node.target in COUNTED for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    run = torch.compile(checkpointed(block, saved), fullgraph=True, backend=backend)
    return three_steps(block, run, name), products


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_the_same_is_kept(name: str | None) -> None:
    eager = three_steps(block := build(), block, name)
    counts = {}
    for saved in ("nothing", "products"):
        got, counts[saved] = compiled(build(), saved, name)
        torch.testing.assert_close(got, eager, rtol=0, atol=0)
    # of the products of three layers, that of the last is not wanted
    assert counts == {"nothing": [3, 6 + 2], "products": [3, 6]}
