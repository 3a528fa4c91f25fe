"""Stored fields that C++ writes in one pass have the bits of the definitions, and the definitions' largest error."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

import te_models.layers.quantizer as quantizers
from te_models.kernels.backend import Backend, using_backend
from te_models.kernels.quantize.cpu import fields as cpu_fields
from te_models.kernels.quantize.fp8.blocks import per_element
from te_models.layers import GroupedLinear, Linear, NVFP4BlockScaling, Recipe, autocast, recipe
from te_models.layers.quantizer.encoding import Scale, Uses
from tests.kernels.triton.quantize.quantize_cases import E4M3, hard, ordinary

ROWWISE = {"rowwise": True, "columnwise": False}
COLUMNWISE = {"rowwise": False, "columnwise": True}
QUANTIZERS: list[quantizers.Quantizer] = [
    quantizers.MXFP8Quantizer(**ROWWISE),
    quantizers.MXFP8Quantizer(**COLUMNWISE),
    quantizers.Float8BlockQuantizer(force_pow_2_scales=False),
    quantizers.Float8BlockQuantizer(block_scaling_dim=1, amax_epsilon=1e-4, **COLUMNWISE),
    quantizers.Float8CurrentScalingQuantizer(),
    quantizers.NVFP4Quantizer(**ROWWISE),
    quantizers.NVFP4Quantizer(with_2d_quantization=True),
]
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
"""Each compiles a library."""


pytestmark = pytest.mark.usefixtures("definitions")


def at_work() -> contextlib.AbstractContextManager[None]:
    """The library computes."""
    return using_backend("compiled")


def _inputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for shape in ((64, 256), (70, 80)):
        yield ordinary(shape, dtype)
        yield hard(shape, dtype, sum(shape)).nan_to_num(posinf=1e30).clamp(-1e30, 1e30)
        yield torch.zeros(shape, dtype=dtype)


def _bytes(field: torch.Tensor) -> torch.Tensor:
    return field.flatten().clone().view(torch.uint8)


def _assert_same_fields(found: quantizers.Fields, wanted: quantizers.Fields, what: object) -> None:
    assert found.keys() == wanted.keys(), what
    for name, field in wanted.items():
        mine = found[name]
        assert (mine.shape, mine.dtype, mine.stride()) == (field.shape, field.dtype, field.stride())
        if field.dtype is torch.float32:  # a NaN may have another payload
            assert torch.equal(mine.isnan(), field.isnan()), (what, name)
            mine, field = mine.nan_to_num(0.0), field.nan_to_num(0.0)
        assert torch.equal(_bytes(mine), _bytes(field)), (what, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fields_and_error(dtype: torch.dtype) -> None:
    for quantizer in QUANTIZERS:
        (usage,) = quantizer.stored_usages()
        for x in _inputs(dtype):
            wanted = quantizer.quantize_fields(x)
            with at_work():
                found = quantizer.encode(x, Scale(), Uses((usage,), measured=True))
            assert found.error is not None
            _assert_same_fields(found.fields, wanted, quantizer)
            assert found.error == float((quantizer.dequantize_fields(wanted, torch.float32, x.shape) - x).abs().max())


EAGER: list[quantizers.Quantizer] = [
    *QUANTIZERS,
    quantizers.MXFP8Quantizer(),
    quantizers.MXFP8Quantizer(two_dimensional=True),
    quantizers.MXFP8Quantizer(fp8_dtype=torch.float8_e5m2),
    quantizers.Float8BlockQuantizer(block_scaling_dim=1),
    quantizers.Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=1e-3),
    quantizers.NVFP4Quantizer(with_rht=True),
    quantizers.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    quantizers.NVFP4Quantizer(row_scaled_nvfp4=True, **ROWWISE),
    quantizers.NVFP4Quantizer(nvfp4_use_4over6=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_quantizers_write_the_same_fields(dtype: torch.dtype) -> None:
    nan = ordinary((32, 64), dtype)
    nan[3, 5] = float("nan")
    infinite = hard((64, 80), dtype, 3).nan_to_num(nan=0.5, posinf=float("inf"), neginf=-float("inf"))
    splits = torch.tensor([0, 33, 1, 20])
    for quantizer in EAGER:
        for x in (*_inputs(dtype), nan, infinite):
            wanted = quantizer.quantize_fields(x)
            operands = [
                quantizer.operand_of_fields(wanted, usage, dtype, x.shape) for usage in quantizer.stored_usages()
            ]
            with at_work():
                _assert_same_fields(quantizer.quantize_fields(x), wanted, quantizer)
                for usage, operand in zip(quantizer.stored_usages(), operands, strict=True):
                    found = quantizer.operand_of_fields(wanted, usage, dtype, x.shape)
                    assert torch.equal(found.values.nan_to_num(-1.0), operand.values.nan_to_num(-1.0)), quantizer
            if x.shape[0] == 64 and not quantizer.symmetric:
                wanted = quantizer.quantize_rows(x, splits)
                with at_work():
                    _assert_same_fields(quantizer.quantize_rows(x, splits), wanted, quantizer)


@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_an_eager_layer_has_the_same_bits(grouped: bool) -> None:
    layer = (GroupedLinear(3, 64, 96, bias=False) if grouped else Linear(64, 96)).bfloat16()
    x, dy = torch.randn(48, 64).bfloat16(), torch.randn(48, 96).bfloat16()
    splits = (torch.tensor([0, 20, 28]),) if grouped else ()

    def step(wanted: Recipe) -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_()
        with autocast(recipe=wanted):
            y = layer(inputs, *splits)
        return [y, *torch.autograd.grad(y, [inputs, *layer.parameters()], dy)]

    nvfp4 = NVFP4BlockScaling(disable_stochastic_rounding=True)  # each step draws other bits
    for its in (recipe("current"), recipe("block"), recipe("mxfp8"), nvfp4):
        wanted = step(its)
        with at_work():
            found = step(its)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), its


def test_a_nan_is_left_to_the_definitions() -> None:
    x = torch.randn(32, 64).bfloat16()
    x[3, 5] = float("nan")
    with at_work():
        for quantizer in QUANTIZERS:
            assert quantizer.encode(x, Scale(), Uses(quantizer.stored_usages(), measured=True)).error is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding(dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(3, 1)[:, :200].contiguous().view(E4M3)
    scales = torch.rand(3, 2) + 0.1
    found = cpu_fields.decode_e4m3(data, scales, 128, dtype)
    wanted = (data.float() * per_element(scales, (1, 128), 3, 200)).to(dtype)
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.uint8), wanted[~nan].view(torch.uint8))


def test_the_library_reads_matrices_as_they_lie() -> None:
    assert cpu_fields.chosen(torch.randn(8, 32)) is Backend.DEFINITION
    with at_work():
        assert cpu_fields.chosen(torch.randn(8, 32)) is Backend.COMPILED
        assert cpu_fields.chosen(torch.randn(8, 32).mT) is Backend.DEFINITION, "not as it lies"
