"""Weights stored as integers: what layers compute with them, in eager code and in graphs, and the numbers they hold."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import te_models.layers as te
from te_models.layers.quantizer import IntQuantizer

QUANTIZERS: dict[str, IntQuantizer] = {
    "int4": te.Int4Quantizer(),
    "int4 zeros": te.Int4Quantizer(group_size=64, zero_points=True, scale_dtype=torch.float16),
    "int8 rows": te.Int8Quantizer(group_size=0, scale_dtype=torch.float32),
    "int8 zeros": te.Int8Quantizer(group_size=128, zero_points=True),
}


def linear(quantizer: IntQuantizer, dtype: torch.dtype = torch.float32) -> tuple[te.Linear, te.Linear]:
    """Return (a layer with a stored weight, the layer with its values)."""
    torch.manual_seed(0)
    stored, plain = (te.Linear(128, 96, bias=True, params_dtype=dtype) for _ in range(2))
    weight = quantizer.quantize(plain.weight.detach())
    stored.weight = nn.Parameter(weight, requires_grad=False)
    plain.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
    with torch.no_grad():
        plain.bias.copy_(stored.bias)
    return stored, plain


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_values_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    stored, plain = linear(QUANTIZERS[name], dtype)
    assert isinstance(stored.weight, te.Int4Tensor if "int4" in name else te.Int8Tensor)
    results = []
    for layer in (stored, plain):
        x = torch.linspace(-1, 1, 40 * 128, dtype=dtype).view(40, 128).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad, layer.bias.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("per_gemm", [False, True])
def test_experts_compute_with_the_values(per_gemm: bool) -> None:
    layer = te.GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=not per_gemm)
    quantizer, x = te.Int4Quantizer(zero_points=True), torch.randn(20, 64, requires_grad=True)
    with torch.no_grad():
        for name, weight in list(layer.named_parameters()):
            found = quantizer.quantize_grouped(weight) if weight.dim() == 3 else quantizer.quantize(weight)
            assert isinstance(found, te.GroupedTensor if weight.dim() == 3 else te.Int4Tensor)
            setattr(layer, name, nn.Parameter(found, requires_grad=False))
    splits = torch.tensor([7, 0, 13])
    y = layer(x, splits)
    y.sum().backward()
    weights = [w.dequantize() for w in layer.parameters()]
    values = torch.stack(weights) if per_gemm else weights[0]
    expected = torch.cat([part @ values[g].mT for g, part in enumerate(x.split(splits.tolist()))])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad[:7], values[0].sum(0).expand(7, -1))


@pytest.mark.parametrize("name", ["int4 zeros", "int8 rows"])
def test_a_graph_is_whole_and_has_the_same_numbers(name: str) -> None:
    stored, _ = linear(QUANTIZERS[name])
    compiled = torch.compile(stored, fullgraph=True)
    x = torch.linspace(-1, 1, 24 * 128).view(24, 128)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(compiled(a), stored(b))
    compiled(a).sum().backward()
    stored(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_fakes_have_the_shapes() -> None:
    for quantizer in QUANTIZERS.values():
        real = quantizer.quantize(torch.randn(48, 128))
        with FakeTensorMode():
            fake = quantizer.quantize(torch.randn(48, 128))
            assert fake.dequantize().shape == (48, 128)
        for field, value in real.fields.items():
            assert (fake.fields[field].shape, fake.fields[field].dtype) == (value.shape, value.dtype)


def test_a_recipe_of_floats_refuses_the_weight() -> None:
    stored, _ = linear(te.Int4Quantizer())
    said = "the weight is stored as int4, but the recipe in force wants mxfp8"
    with te.autocast(recipe=te.MXFP8BlockScaling()), pytest.raises(ValueError, match=said):
        stored(torch.randn(32, 128))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_files_hold_the_weight(name: str) -> None:
    stored, _ = linear(QUANTIZERS[name])
    file = io.BytesIO()
    torch.save(stored.state_dict(), file)
    file.seek(0)
    again: Any = torch.load(file, weights_only=True)["weight"]
    assert again.quantizer == QUANTIZERS[name]
    for field, value in stored.weight.fields.items():
        assert torch.equal(again.fields[field], value)


def test_hand_computed_numbers() -> None:
    """Steps of 7.5 below the largest magnitude; with zero points 15 steps from the least value to the largest."""
    x = torch.tensor([[7.5, -7.5, 1.0, 0.4, -0.6, 3.5, 2.5, 0.0]])
    symmetric = te.Int4Quantizer(group_size=8, scale_dtype=torch.float32).quantize(x)
    assert symmetric.rowwise_scale_inv.item() == 1.0
    assert symmetric.dequantize().tolist() == [[7.0, -8.0, 1.0, 0.0, -1.0, 4.0, 2.0, 0.0]]
    assert symmetric.rowwise_data.tolist() == [[15 | 0 << 4, 9 | 8 << 4, 7 | 12 << 4, 10 | 8 << 4]]
    y = torch.tensor([[10.0, -5.0, 0.0, 1.0, 2.2, -4.6, 9.4, 3.0]])
    zeros = te.Int4Quantizer(group_size=8, zero_points=True, scale_dtype=torch.float32).quantize(y)
    assert (zeros.rowwise_scale_inv.item(), zeros.rowwise_zero_point.item()) == (1.0, 5)
    assert zeros.dequantize().tolist() == [[10.0, -5.0, 0.0, 1.0, 2.0, -5.0, 9.0, 3.0]]
    nothing = te.Int8Quantizer(group_size=8, scale_dtype=torch.float32).quantize(torch.zeros(1, 8))
    assert nothing.dequantize().abs().max() == 0


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizing_is_what_compressed_tensors_does(name: str) -> None:
    """Its own functions, for scales, codes and values."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    quantizer = QUANTIZERS[name]
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    size = quantizer.group_size or 128
    strategy = "group" if quantizer.group_size else "channel"
    options = {"num_bits": quantizer.BITS, "type": "int", "symmetric": not quantizer.zero_points}
    args = quantization.QuantizationArgs(strategy=strategy, group_size=quantizer.group_size or None, **options)
    groups = x.unflatten(-1, (-1, size))
    scale, zero = helpers.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scale = scale.to(quantizer.scale_dtype)
    found = quantizer.quantize(x)
    torch.testing.assert_close(found.rowwise_scale_inv, scale, rtol=0, atol=0)
    offset = 2 ** (quantizer.BITS - 1)
    # the zero point from the rounded scale, as ours; theirs is from the scale before it was rounded
    own: Tensor | None = found.rowwise_zero_point.int() - offset if quantizer.zero_points else None
    if own is not None:
        assert (own - zero.round()).abs().max() <= 1
    codes = forward.quantize(x=x, scale=scale.float(), zero_point=own, args=args, dtype=torch.int8)
    stored = found.rowwise_data
    if quantizer.BITS == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    assert torch.equal(stored.int() - offset, codes.int())
    values = forward.dequantize(x_q=codes, scale=scale.float(), zero_point=own, args=args)
    assert torch.equal(found.dequantize(torch.float32), values)
