"""What rounds and decodes in vectors has the definitions' bits: every bfloat16, rests of rows, scales at the ends."""

import shutil

import pytest
import torch
from torch import Tensor

from te_models.kernels.quantize.cpu import fields
from te_models.kernels.quantize.cpu import rounding as library
from te_models.kernels.quantize.fp8 import rounding
from te_models.kernels.quantize.fp8.blocks import per_element
from te_models.kernels.quantize.nvfp4 import reference as nvfp4
from tests.kernels.quantize.test_cpu_graph import assert_same
from tests.kernels.triton.quantize.quantize_cases import E4M3, E5M2, ordinary

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="the library is C++, and there is no compiler"
)
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [BF16, pytest.param(F32, marks=pytest.mark.slow)]
PAIRS = [(BF16, BF16), *(pytest.param((F32, dtype), marks=pytest.mark.slow) for dtype in (F32, BF16))]
"""Of the numbers, and of their rounded values. Each compiles a library."""
WIDTH = 119
"""Columns of the narrower matrices: seven vectors of 16 lanes, or 14 of eight, and seven numbers that are left."""


def numbers(dtype: torch.dtype) -> dict[str, Tensor]:
    finite = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    finite = finite[finite.isfinite()]
    finite = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))].view(-1, 128).to(dtype)
    nan, infinite = ordinary((64, WIDTH), dtype), ordinary((64, WIDTH), dtype)
    nan[3, 5], nan[20, 118], infinite[3, 5], infinite[40, 118] = float("nan"), float("nan"), float("inf"), -float("inf")
    tiny = (ordinary((32, WIDTH), F32) * 1e-38).to(dtype)
    return {"finite": finite, "nan": nan, "infinite": infinite, "tiny": tiny, "zero": torch.zeros(16, 48, dtype=dtype)}


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_fp8(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    cases = [((1, 32), "e8m0"), ((32, 1), "e8m0"), ((128, 128), "pow2"), ((1, 128), "float32"), ((1, 4), "pow2")]
    for x in numbers(dtypes[0]).values():
        for fp8_dtype in (E4M3, E5M2):
            for block, kind in cases:
                found = library.round_fp8(x, block, fp8_dtype, kind, dtypes[1], 0.0)
                assert_same(found, rounding.round_blockwise(x, block, fp8_dtype, kind, dtypes[1], epsilon=0.0))
            for found, wanted in zip(
                library.round_current(x, fp8_dtype, False, 0.0, dtypes[1]),
                rounding.round_current(x, fp8_dtype, dtypes[1], pow2=False, epsilon=0.0),
                strict=True,
            ):
                assert_same(found, wanted)
            for scale in (1.0, 37.3, 1e-30, 1e30, 0.0, -2.0, float("inf"), float("nan")):
                found = library.round_scaled(x, torch.tensor(scale), fp8_dtype, dtypes[1])
                assert_same(found, rounding.round_per_tensor(x, torch.tensor(scale), fp8_dtype, dtypes[1]))


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_nvfp4(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    key = torch.tensor([3, 5])
    for x in numbers(dtypes[0]).values():
        for amax in (x.float().abs().amax(), torch.tensor(1.0), torch.tensor(0.0)):
            for block, drawn in (((1, 16), None), ((16, 1), None), ((16, 16), None), ((1, 16), key), ((16, 1), key)):
                wanted, _ = nvfp4.round_nvfp4(x, dtypes[1], block=block, amax=amax, key=drawn, stream=1)
                assert_same(library.round_nvfp4(x, block, amax, dtypes[1], drawn, 1), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_errors_are_those_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    for name, x in numbers(dtype).items():
        x = x[:, : x.shape[1] // 16 * 16].contiguous()
        amax = float(x.float().abs().amax())
        stored = [
            (fields.quantize_blocks(x, block, kind, 0.0), block, kind)
            for block, kind in (((1, 32), "e8m0"), ((32, 1), "e8m0"), ((128, 128), "float32"), ((1, 4), "pow2"))
        ]
        packed = fields.quantize_nvfp4(x, 1, amax)
        scaled = [(fields.quantize_scaled(x, scale, 0.5), scale) for scale in (2.0, 37.3, -2.0, 1e30)]
        if x.isnan().any():  # which is left to the definitions
            assert [found for found, *_ in (*stored, *scaled)] == [None] * 8 and packed is None
            continue
        for found, block, kind in stored:
            wanted = rounding.round_blockwise(x, block, E4M3, kind, F32, epsilon=0.0)
            decoded = fields.decode_fp8_blocks(found[0], found[1], block, F32)
            assert torch.equal(decoded, wanted), (name, block, kind)
            assert_same(torch.tensor(found[2]), (wanted - x.float()).abs().amax())
        for found, scale in scaled:
            assert found is not None
            product = x.float() * scale
            wanted = torch.where(product.isnan(), product, product.clamp(-448, 448)).to(E4M3)
            assert torch.equal(found[0].float().nan_to_num(7.0), wanted.float().nan_to_num(7.0)), (name, scale)
        wanted, _ = nvfp4.round_nvfp4(x, F32, block=(1, 16), amax=torch.tensor(amax))
        assert torch.equal(fields.decode_nvfp4(packed[0], packed[1], F32), wanted), name
        decoded = wanted * nvfp4.global_decode(torch.tensor(amax))
        assert_same(torch.tensor(packed[2]), (decoded - x.float()).abs().amax())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_times_every_kind_of_scale(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    every = torch.randint(256, (64, WIDTH), dtype=torch.uint8, generator=generator)
    no_nan = torch.where(every & 0x7F == 0x7F, 0x80, every)
    for data in (every.view(E4M3), no_nan.view(E4M3)):
        for block in ((1, 32), (32, 1), (1, 4)):
            grid = [-(-size // length) for size, length in zip(data.shape, block, strict=True)]
            payload = torch.full(grid, 0x7FFFFFFF, dtype=torch.int32).view(F32)  # a NaN that rounding would carry over
            exponents = torch.randint(-140, 121, grid, generator=generator).float()
            nan = torch.full(grid, float("nan"))
            for scales in (exponents.exp2(), exponents.exp(), -torch.rand(grid), nan, payload):
                wanted = (data.float() * per_element(scales, block, *data.shape)).to(dtype)
                assert_same(fields.decode_fp8_blocks(data, scales, block, dtype), wanted)
                if block[0] == 1:
                    assert_same(fields.decode_e4m3(data, scales, block[1], dtype), wanted)
        assert fields.has_nan(data) == bool(data.float().isnan().any())
    packed = every[:, :112]
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.stack((packed & 7, packed >> 4 & 7), -1).long()]
    values = torch.copysign(values, 0.5 - (torch.stack((packed & 8, packed >> 4 & 8), -1) > 0).float()).flatten(1)
    for scales in (every[:, :14], no_nan[:, :14] & 0x7F, torch.full((64, 14), 0x80, dtype=torch.uint8)):
        wanted = (values * scales.contiguous().view(E4M3).float().repeat_interleave(16, 1)).to(dtype)
        assert_same(fields.decode_nvfp4(packed, scales.contiguous().view(E4M3), dtype), wanted)
