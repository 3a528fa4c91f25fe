"""Quantized tensors as inputs and outputs of compiled functions: one graph for all values, the same bits as eager."""

import pytest
import torch
from torch import nn

from te_models.layers import GroupedTensor, NVFP4Quantizer, QuantizedTensor
from tests.build import weight_quantizers
from tests.compare import in_dtype, same_bits

FORMATS = weight_quantizers() | {"nvfp4_rht": NVFP4Quantizer(with_rht=True)}


def make(name: str, seed: int, grouped: bool = False) -> QuantizedTensor:
    torch.manual_seed(seed)
    quantizer = FORMATS[name]
    return quantizer.quantize_grouped(torch.randn(2, 32, 48)) if grouped else quantizer.quantize(torch.randn(32, 48))


@pytest.mark.sentinels("float8-False", "nvfp4-True", "hybrid-True")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_pass_through_a_graph_unharmed(name: str, grouped: bool) -> None:
    """The graph copies bytes: "aot_eager" flattens inputs and rebuilds outputs as every backend does."""

    def function(x: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor, QuantizedTensor]:
        return x.clone(), x.dequantize(), x.detach()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = make(name, seed, grouped)
        clone, values, alias = compiled(x)
        for y in (clone, alias):
            assert type(y) is type(x) and isinstance(y, GroupedTensor) == grouped
            assert (y.quantizer, y.dtype, y.shape) == (x.quantizer, x.dtype, x.shape) and same_bits(y, x)
        assert clone.rowwise_data.data_ptr() != x.rowwise_data.data_ptr()
        assert torch.equal(values, x.dequantize())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.sentinels("hybrid")
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "nvfp4_rht"])
def test_graphs_quantize_and_update_in_place(name: str) -> None:
    quantizer = FORMATS[name]

    def function(parameter: QuantizedTensor, x: torch.Tensor) -> QuantizedTensor:
        with torch.no_grad():
            parameter.copy_(x)
        return quantizer.quantize(x * 2)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    parameter = nn.Parameter(make(name, 0))
    pointers = [field.data_ptr() for field in parameter.fields.values()]
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(32, 48)
        made = compiled(parameter, x)
        assert same_bits(made, quantizer.quantize_fields(x * 2)) and type(made) is type(make(name, 0))
        assert same_bits(parameter, quantizer.quantize_fields(x))
    assert [field.data_ptr() for field in parameter.fields.values()] == pointers
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_graphs_return_the_values_in_another_dtype() -> None:
    def function(x: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        return x.float(), x.to(torch.bfloat16), x.detach().clone().double(), torch.empty_like(x, dtype=torch.float16)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = make("mxfp8", seed)
        for got, expected in zip(compiled(x)[:3], function(x), strict=False):
            assert type(got) is torch.Tensor and got.dtype == expected.dtype and torch.equal(got, expected)
        assert type(compiled(x)[3]) is torch.Tensor
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_another_format_or_usage_is_another_graph() -> None:
    compiled = torch.compile(lambda x: x.dequantize() + 1, fullgraph=True, backend="aot_eager")
    for i, x in enumerate((make("mxfp8", 0), make("mxfp8", 0).update_usage(columnwise=False), make("float8", 0)), 1):
        assert torch.equal(compiled(x), x.dequantize() + 1)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == i


def test_the_key_of_the_compilers_cache_tells_tensors_apart() -> None:
    base = make("mxfp8", 0)
    same = [base, make("mxfp8", 1), base.clone()]
    other = [make("float8", 0), make("mxfp8", 0, True), in_dtype(base, torch.bfloat16), base.view(-1), base.t()]
    other += [base.clone().update_usage(columnwise=False), nn.Parameter(base)]
    assert len({x._stable_hash_for_caching() for x in same}) == 1
    assert len({x._stable_hash_for_caching() for x in (base, *other)}) == 1 + len(other)


def test_a_slice_that_shares_its_scale_is_read_only_in_a_graph() -> None:
    compiled = torch.compile(lambda x: x[:16], fullgraph=True, backend="aot_eager")
    base = make("float8", 0)
    before = base.clone()
    for part in (base[:16], compiled(base)):
        assert part.shares_scale
        with pytest.raises(Exception, match="shares the one scale"):
            torch.compile(lambda x: x.mul_(2.0), fullgraph=True, backend="aot_eager")(part)
    assert same_bits(base, before)
