"""Stored fields that C++ writes in one pass have the bits of the definitions, and the definitions' largest error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_models.kernels.quantize import cpu_fields
from te_models.kernels.quantize.cpu_graph import library
from te_models.kernels.quantize.fp8.blocks import per_element
from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.kernels.triton.quantize.quantize_cases import E4M3, hard, ordinary

LEAST = library.LEAST
"""As it is without the tests."""
ROWWISE = {"rowwise": True, "columnwise": False}
COLUMNWISE = {"rowwise": False, "columnwise": True}
QUANTIZERS: list[Quantizer] = [
    MXFP8Quantizer(**ROWWISE),
    MXFP8Quantizer(**COLUMNWISE),
    Float8BlockQuantizer(force_pow_2_scales=False),
    Float8BlockQuantizer(block_scaling_dim=1, amax_epsilon=1e-4, **COLUMNWISE),
    Float8CurrentScalingQuantizer(),
    NVFP4Quantizer(**ROWWISE),
    NVFP4Quantizer(with_2d_quantization=True),
]
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
"""Each compiles a library."""


@pytest.fixture
def at_work() -> Iterator[None]:
    """The library computes from the first element on."""
    before, library.LEAST = library.LEAST, 0
    yield
    library.LEAST = before


def _inputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for shape in ((64, 256), (70, 80)):
        yield ordinary(shape, dtype)
        yield hard(shape, dtype, sum(shape)).nan_to_num(posinf=1e30).clamp(-1e30, 1e30)
        yield torch.zeros(shape, dtype=dtype)


def _bytes(field: torch.Tensor) -> torch.Tensor:
    return field.flatten().clone().view(torch.uint8)


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fields_and_error(dtype: torch.dtype) -> None:
    for quantizer in QUANTIZERS:
        (usage,) = quantizer.stored_usages()
        for x in _inputs(dtype):
            found = quantizer.quantize_in_one_pass(x, usage, None)
            assert found is not None
            fields, error = dict(zip(quantizer.field_names(), found[0], strict=True)), found[1]
            wanted = quantizer.quantize_fields(x)
            for name, field in wanted.items():
                assert (field.shape, field.dtype) == (fields[name].shape, fields[name].dtype)
                assert torch.equal(_bytes(fields[name]), _bytes(field)), (quantizer, name)
            assert error == float((quantizer.dequantize_fields(wanted, torch.float32, x.shape) - x).abs().max())


@pytest.mark.usefixtures("at_work")
def test_a_nan_is_left_to_the_definitions() -> None:
    x = torch.randn(32, 64).bfloat16()
    x[3, 5] = float("nan")
    for quantizer in QUANTIZERS:
        assert quantizer.quantize_in_one_pass(x, quantizer.stored_usages()[0], None) is None


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding(dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(3, 1)[:, :200].contiguous().view(E4M3)
    scales = torch.rand(3, 2) + 0.1
    found = cpu_fields.decode_e4m3(data, scales, 128, dtype)
    wanted = (data.float() * per_element(scales, (1, 128), 3, 200)).to(dtype)
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.uint8), wanted[~nan].view(torch.uint8))


def test_little_work_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LEAST", LEAST)
    monkeypatch.setattr(library, "_elements", [0])
    monkeypatch.setattr(library, "available", lambda trial: pytest.fail("asked for a compiler"))
    assert not cpu_fields.ready(torch.randn(8, 32))
