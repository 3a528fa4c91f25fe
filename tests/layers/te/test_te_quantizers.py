"""Quantizers as programs of Transformer Engine make and use them: arguments, usages, buffers, gradients, shapes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.layers as te
from tests.compare import refused, same_bits

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
OFF = dict.fromkeys(("with_amax_reduction", "with_rht", "with_post_rht_amax", "with_2d_quantization"), False)
OFF |= {"stochastic_rounding": False}
MAKERS: dict[str, Callable[[], Any]] = {
    "delayed": lambda: te.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3, rowwise=True, columnwise=True),
    "current": lambda: te.Float8CurrentScalingQuantizer(E5M2, torch.device("cpu"), rowwise=True, columnwise=True),
    "block": lambda: te.Float8BlockQuantizer(
        fp8_dtype=E4M3, rowwise=True, columnwise=True, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=1
    ),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3, rowwise=True, columnwise=True),
    "nvfp4": lambda: te.NVFP4Quantizer(
        fp4_dtype=te.DType.kFloat4E2M1, rowwise=True, columnwise=True, amax_reduction_group=None, **OFF
    ),
}
X = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MAKERS)
def test_leading_dimensions_are_flattened(name: str) -> None:
    quantizer = MAKERS[name]()
    flat, cube = quantizer(X.view(32, 64)), quantizer(X)
    assert cube.shape == X.shape and cube.dtype == X.dtype and same_bits(flat, cube)
    assert torch.equal(cube.dequantize(), flat.dequantize().view(X.shape))
    line = quantizer(X[0, 0])
    assert line.shape == (64,) and torch.equal(line.dequantize(), quantizer(X[0, :1]).dequantize()[0])


@pytest.mark.parametrize("name", MAKERS)
def test_one_number_without_dimensions(name: str) -> None:
    quantizer, x = MAKERS[name](), X[0, 0, 0].clone().requires_grad_()
    one, matrix = quantizer(x), quantizer(X[:1, 0, :1])
    assert one.shape == () and same_bits(one, matrix) and torch.equal(one.dequantize(), matrix.dequantize()[0, 0])
    one.dequantize().backward()
    assert x.grad.item() == 1
    made = quantizer.make_empty([], dtype=torch.bfloat16)
    assert made.shape == () and made.dtype == torch.bfloat16
    quantizer.update_quantized(X[0, 0, 0], made)
    assert same_bits(made, one) and torch.equal((one + 1).detach(), one.dequantize().detach() + 1)
    copied = copy.deepcopy(made)
    assert copied.shape == () and same_bits(copied, made)
    assert made.reshape(1).shape == (1,) and torch.equal(made.view(1, 1).dequantize(), made.dequantize().view(1, 1))


@pytest.mark.parametrize("name", MAKERS)
def test_the_gradient_passes_unchanged(name: str) -> None:
    quantizer, x = MAKERS[name](), X.clone().requires_grad_()
    y = quantizer(x)
    grad = torch.randn(X.shape)
    assert y.requires_grad
    y.dequantize().backward(grad)
    assert torch.equal(x.grad, grad) and not quantizer(X).requires_grad
    with torch.no_grad():
        assert not quantizer(x).requires_grad


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_are_made_empty_and_updated(name: str) -> None:
    quantizer = MAKERS[name]()
    made = quantizer.make_empty([4, 8, 64], dtype=torch.bfloat16, device="cpu", requires_grad=True)
    assert (made.shape, made.dtype, made.requires_grad) == ((4, 8, 64), torch.bfloat16, True)
    out = quantizer.make_empty((4, 8, 64))
    assert quantizer.update_quantized(X, out) is out and same_bits(out, quantizer(X))
    quantizer.update_quantized(2.5 * X, out, noop_flag=torch.ones(1))
    assert same_bits(out, quantizer(X))
    quantizer.update_quantized(2.5 * X, out, noop_flag=torch.zeros(1))
    assert same_bits(out, quantizer(2.5 * X))
    assert quantizer.quantize(X, out=out) is out and same_bits(out, quantizer(X))
    assert [same_bits(t, quantizer(X)) for t in quantizer.multi_quantize([X, X])] == [True, True]
    for wrong in (torch.empty(4, 8, 64), te.IdentityQuantizer()(X)):
        with pytest.raises(ValueError, match="cannot update"):
            quantizer.update_quantized(X, wrong)
    refused(lambda: quantizer.update_quantized(X[:2], out), "cannot quantize shape")


@pytest.mark.parametrize("name", ["block", "mxfp8", "nvfp4"])
def test_usages_are_set_on_the_object(name: str) -> None:
    quantizer = MAKERS[name]()
    value = quantizer.copy()
    before = quantizer(X)
    assert quantizer.set_usage(rowwise=False) is None
    quantizer.set_usage(rowwise=True, columnwise=False)
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (True, False)
    assert {field.partition("_")[0] for field in quantizer(X).fields} == {"rowwise"}
    quantizer.set_usage(rowwise=False)
    quantizer.set_usage(columnwise=True)
    assert quantizer.get_usages() == {"rowwise": False, "columnwise": True}
    assert {field.partition("_")[0] for field in quantizer.make_empty((8, 64)).fields} == {"columnwise"}
    assert same_bits(quantizer(X), value.with_usage(rowwise=False, columnwise=True)(X))
    assert quantizer.copy() == value.with_usage(rowwise=False, columnwise=True)
    assert quantizer == value and same_bits(before, value(X))  # the value is what it was, and so are its tensors
    refused(quantizer.__fx_repr__, "live state that a graph cannot hold", error=TypeError)
    value.__fx_repr__()


def test_a_live_quantizer_records_and_is_copied_with_its_tensors() -> None:
    scale, amax = torch.full((1,), 2.0), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3, columnwise=False)
    assert quantizer.fp8_dtype == torch.float8_e4m3fn
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    quantizer(X)
    assert amax.item() == X.abs().max().item()
    quantizer.calibrate(torch.full((3,), -70.0))
    assert amax.item() == 70
    other = quantizer.copy()
    other.set_usage(columnwise=True)
    scale.fill_(8.0)
    assert other.get_usages()["columnwise"] and not quantizer.columnwise_usage
    assert other(X).fields["rowwise_scale_inv"].item() == 1 / 8


def test_arguments_without_meaning_here_are_taken_at_their_defaults() -> None:
    for wrong in ({"with_amax_reduction": True}, {"amax_reduction_group": object()}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*, which this library does not have"):
            te.Float8CurrentScalingQuantizer(E4M3, "cpu", **wrong)
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*, which this library does not have"):
            te.NVFP4Quantizer(**wrong)
    refused(lambda: te.MXFP8Quantizer(te.DType.kBFloat16), "fp8_dtype is torch.bfloat16; allowed: ")
    assert te.MXFP8Quantizer(E4M3) == te.MXFP8Quantizer(torch.float8_e4m3fn) == te.MXFP8Quantizer()


def test_a_script_that_compares_two_ways_of_quantizing_a_weight() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 32))
    quantizer = te.MXFP8Quantizer(fp8_dtype=E4M3)
    quantizer.set_usage(rowwise=True, columnwise=True)

    def loss(w: Tensor) -> Tensor:
        return (w.dequantize() if isinstance(w, te.QuantizedTensor) else w).square().sum()

    loss(quantizer(weight)).backward()
    assert torch.equal(weight.grad, 2 * quantizer(weight.detach()).dequantize())


def test_blocks_of_two_dimensions_have_either_name() -> None:
    theirs, ours = te.MXFP8Quantizer(E4M3, with_2d_quantization=True), te.MXFP8Quantizer(two_dimensional=True)
    assert theirs == ours and hash(theirs) == hash(ours) and theirs.copy() == ours
    assert theirs.with_2d_quantization is True and te.MXFP8Quantizer().with_2d_quantization is False
    assert same_bits(theirs(X), ours(X)) and theirs.with_usage(rowwise=True, columnwise=False).two_dimensional
    with pytest.raises(ValueError, match="with_2d_quantization and two_dimensional are both given"):
        te.MXFP8Quantizer(E4M3, with_2d_quantization=True, two_dimensional=True)
