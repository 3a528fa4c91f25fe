"""Quantized data and scales equal, bit for bit, an emulation that shares no code with the kernels."""

import numpy as np
import pytest
import torch

from te_models.kernels import quantize as q
from tests.layers import emulation as em

pytestmark = pytest.mark.usefixtures("each_backend")

FORMATS = {em.E4M3.dtype: em.E4M3, em.E5M2.dtype: em.E5M2}
KINDS = [
    *(((1, 128), "pow2"), ((1, 128), "float32"), ((128, 1), "pow2"), ((128, 128), "pow2"), ((128, 128), "float32")),
    *(((1, 32), "e8m0"), ((32, 1), "e8m0"), ((32, 32), "e8m0")),
]
SHAPES = [(1, 1), (1, 31), (3, 32), (15, 33), (16, 127), (17, 128), (33, 129), (130, 257), (2, 1000)]


def assert_bitwise(data: torch.Tensor, stored: torch.Tensor, expected: em.Quantized) -> None:
    """Compare codes and scales; a NaN may have any payload."""
    codes = data.view(torch.uint8).numpy()
    nan = np.isnan(FORMATS[data.dtype].decode(codes))
    np.testing.assert_array_equal(nan, np.isnan(expected.values) & np.isnan(FORMATS[data.dtype].decode(expected.codes)))
    np.testing.assert_array_equal(codes[~nan], expected.codes[~nan])
    np.testing.assert_array_equal(stored.numpy(), expected.stored)


def matrix(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    largest = torch.finfo(dtype).max  # infinities have a test of their own
    return em.hard_values(shape[0] * shape[1], seed).view(shape).clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("fp8_dtype", q.FP8_MAX, ids=str)
def test_every_bfloat16_rounds_as_the_table_says(fp8_dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[torch.isfinite(every)]
    fmt = FORMATS[fp8_dtype]
    got = q.quantize_per_tensor(x, torch.ones(()), fp8_dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got, em.cast(x.float().numpy(), np.float32(1), fmt))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", em.OVERFLOW, ids=str)
@pytest.mark.parametrize("block, kind", KINDS, ids=str)
def test_blockwise_equals_emulation(block: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    overflow = em.OVERFLOW[dtype]
    for fp8_dtype, fmt in FORMATS.items():
        for seed, shape in enumerate(SHAPES):
            x = matrix(shape, dtype, seed)
            data, stored = q.quantize_blockwise(x, block, fp8_dtype, kind)
            expected = em.quantize(x.float().numpy(), block, fmt, kind, overflow)
            assert_bitwise(data, stored, expected)
            values = q.dequantize_blockwise(data, stored, block, torch.float32)
            np.testing.assert_array_equal(values.numpy(), expected.values.astype(np.float32))


@pytest.mark.parametrize("block, kind", KINDS, ids=str)
def test_float64_has_the_scales_of_float32(block: tuple[int, int], kind: str) -> None:
    """Whose largest number is also where one that overflows stops."""
    x = matrix((64, 256), torch.float32, 1)
    x[:32, :128] = 2.0**-149
    for got, expected in zip(*(q.quantize_blockwise(v, block, torch.float8_e4m3fn, kind) for v in (x.double(), x))):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("block, kind", KINDS, ids=str)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 0.0, 2.0**-149, 5.0])
def test_special_blocks(block: tuple[int, int], kind: str, special: float) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    x[:32, :128] = special
    x[40, 200] = special
    data, stored = q.quantize_blockwise(x, block, torch.float8_e4m3fn, kind)
    assert_bitwise(data, stored, em.quantize(x.numpy(), block, em.E4M3, kind))


def test_a_batch_of_matrices_is_quantized_member_by_member() -> None:
    x = torch.stack([matrix((40, 130), torch.float32, seed) for seed in range(3)])
    for block, kind in KINDS:
        data, stored = q.quantize_blockwise(x, block, torch.float8_e4m3fn, kind)
        for member, d, s in zip(x, data, stored, strict=True):
            one, one_stored = q.quantize_blockwise(member, block, torch.float8_e4m3fn, kind)
            assert torch.equal(one.view(torch.uint8), d.view(torch.uint8)) and torch.equal(one_stored, s)


@pytest.mark.parametrize("shape", [(0, 128), (64, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    for block, kind in KINDS:
        data, stored = q.quantize_blockwise(torch.empty(shape), block, torch.float8_e4m3fn, kind)
        assert data.shape == shape and stored.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        assert q.dequantize_blockwise(data, stored, block, torch.bfloat16).shape == shape


def test_non_contiguous_input() -> None:
    x = matrix((130, 66), torch.float32)
    for block, kind in KINDS:
        strided = q.quantize_blockwise(x.t(), block, torch.float8_e4m3fn, kind)
        copied = q.quantize_blockwise(x.t().contiguous(), block, torch.float8_e4m3fn, kind)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(strided, copied, strict=True))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_scale_is_a_true_division(compiled: bool) -> None:
    amax = torch.rand(10000, generator=torch.Generator().manual_seed(0)) * 100
    scale = torch.compile(q.scale_from_amax, fullgraph=True) if compiled else q.scale_from_amax
    np.testing.assert_array_equal(scale(amax, torch.float8_e4m3fn).numpy(), np.float32(448) / amax.numpy())


def test_scale_exceptions() -> None:
    amax = torch.tensor([0.0, float("inf"), float("nan"), 1e-40, 448.0, 3.0])
    scale = q.scale_from_amax(amax, torch.float8_e4m3fn)
    assert scale.tolist()[:5] == [1.0, 1.0, 1.0, torch.finfo(torch.float32).max, 1.0]
    assert q.scale_from_amax(amax, torch.float8_e4m3fn, pow2=True)[5] == 128.0
    assert q.scale_from_amax(torch.tensor(0.0), torch.float8_e4m3fn, epsilon=1.0) == 448.0


def test_the_smallest_scale_bytes() -> None:
    """Byte 0 is 2^-127, a subnormal: it holds an amax of up to 448 * 2^-127, and one rounding step more needs 1."""
    smallest = 448 * 2.0**-127
    above = float(np.nextafter(np.float32(smallest), np.float32(1)) + 448 * 2.0**-149)
    x = torch.tensor([[0.0], [2.0**-149], [smallest], [above], [448 * 2.0**-126]]) * torch.eye(1, 32)
    _, stored = q.quantize_blockwise(x, (1, 32), torch.float8_e4m3fn, "e8m0")
    assert stored.flatten().tolist() == [0, 0, 0, 1, 1]


def test_scale_bytes() -> None:
    found = q.e8m0_to_float(torch.tensor([0, 1, 127, 254], dtype=torch.uint8)).tolist()
    assert found == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert torch.isnan(q.e8m0_to_float(torch.tensor(255, dtype=torch.uint8)))


def test_amax_keeps_nan() -> None:
    x = torch.ones(2, 64)
    x[0, 3] = float("nan")
    amax = q.blockwise_amax(x, (1, 32))
    assert torch.isnan(amax[0, 0]) and amax[0, 1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(33, 129), (48, 160), (1, 100)], ids=str)
def test_compiled_equals_eager_at_ragged_edges(shape: tuple[int, int]) -> None:
    """torch 2.13's C++ backend drops columns past the last whole block of an expanded and sliced scale."""
    x = matrix(shape, torch.bfloat16, 3)

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for block, kind in (((1, 128), "pow2"), ((128, 128), "pow2"), ((32, 1), "e8m0"), ((32, 32), "e8m0")):
            data, stored = q.quantize_blockwise(x, block, torch.float8_e4m3fn, kind)
            found += [data.view(torch.uint8), stored, q.dequantize_blockwise(data, stored, block, torch.bfloat16)]
        return found

    torch.testing.assert_close(both(x), torch.compile(both, fullgraph=True)(x), rtol=0, atol=0)
