"""A compiled function takes a quantizer as a constant: one graph for equal ones, one more for each other value."""

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from te_models.layers.quantizer import Fields, Quantizer
from tests.compare import raw
from tests.layers.quantizer.examples import DELAYED, EXAMPLES, STOCHASTIC

CONSTANTS = EXAMPLES | {"delayed": DELAYED}


def fields_and_operands(x: Tensor, key: Tensor | None, quantizer: Quantizer) -> tuple[Fields, list[Tensor]]:
    fields = quantizer.quantize_fields(x, key)
    operands = [quantizer.rounded(x, usage, torch.float32, key) for usage in ("rowwise", "columnwise")]
    return fields, [t for operand in operands for t in operand if t is not None]


def assert_same(got: tuple[Fields, list[Tensor]], expected: tuple[Fields, list[Tensor]]) -> None:
    assert got[0].keys() == expected[0].keys()
    for a, b in zip((*got[0].values(), *got[1]), (*expected[0].values(), *expected[1]), strict=True):
        assert a.dtype == b.dtype and torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("everyday", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_graph_per_value(everyday: bool) -> None:
    """everyday: the first two quantizers, of two classes."""
    one_each = {type(quantizer): quantizer for quantizer in CONSTANTS.values()}
    constants = list(one_each.values())[:2] if everyday else CONSTANTS.values()
    counter = CompileCounter()
    compiled = torch.compile(fields_and_operands, backend=counter, fullgraph=True)
    x = torch.randn(33, 48)
    for count, quantizer in enumerate(constants, start=1):
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(CONSTANTS))
        for equal in (quantizer, copy.deepcopy(quantizer), quantizer):
            assert_same(compiled(x, None, equal), fields_and_operands(x, None, equal))
        assert counter.frame_count == count


@pytest.mark.slow
@pytest.mark.parametrize("columnwise_stored", [False, True])
def test_inductor_rounds_stochastically_to_the_same_bits(columnwise_stored: bool) -> None:
    """Random bits are a function of key and index, no constants of the graph, and roundings to bfloat16 stay."""
    quantizer = STOCHASTIC.with_usage(rowwise=not columnwise_stored, columnwise=columnwise_stored)
    direct = "rowwise" if columnwise_stored else "columnwise"

    def run(x: Tensor, key: Tensor) -> tuple[Fields, list[Tensor]]:
        operand = quantizer.rounded(x, direct, torch.bfloat16, key)
        assert operand.scale is not None
        return quantizer.quantize_fields(x, key), [operand.values, operand.scale]

    compiled = torch.compile(run, fullgraph=True)
    counters.clear()
    x = torch.randn(48, 50, generator=torch.Generator().manual_seed(0))
    for seed, step in ((1, 2), (-(2**40), 2**33), (7, 0)):
        key = torch.tensor([seed, step])
        assert_same(compiled(x, key), run(x, key))
    assert counters["stats"]["unique_graphs"] == 1
