"""FP8 rounding by float32 arithmetic, and casts that saturate: the numbers of a clamped cast, bit for bit."""

import pytest
import torch

from te_models.kernels import quantize as q
from te_models.kernels.quantize.fp8.rounding import round_fp8
from te_models.kernels.torch_versions import saturating_cast

FORMATS = list(q.FP8_MAX)


def words() -> torch.Tensor:
    """Float32 numbers of every exponent and sign: each top 13 bits with low bits at, next to and between ties."""
    top = torch.arange(1 << 13, dtype=torch.int64)[:, None] << 19
    low = torch.tensor([0, 1, 2, 3, *(k << 16 for k in range(1, 8)), (1 << 18) - 1, (1 << 18) + 1, (1 << 19) - 1])
    noise = torch.randint(1 << 19, (16,), generator=torch.Generator().manual_seed(0))
    return (top + torch.cat([low, noise])).to(torch.int32).view(torch.float32).flatten()


def expected(v: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """The nearest number of the format, ties to the even code, infinities saturated: by comparing, not by casting."""
    codes = torch.arange(127 if fp8_dtype is torch.float8_e4m3fn else 124, dtype=torch.uint8)
    numbers = codes.view(fp8_dtype).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    magnitude = v.abs().double()
    at = torch.searchsorted(middles, magnitude)  # the count of middles below the magnitude
    tie = (at < len(middles)) & (middles[at.clamp(max=len(middles) - 1)] == magnitude)
    return torch.where(v.isnan(), v, torch.copysign(numbers[at + (tie & (at % 2 == 1))].float(), v))


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int32), wanted[~nan].view(torch.int32))


def round_all(v: torch.Tensor, tail: torch.Tensor) -> list[torch.Tensor]:
    """Return v rounded to, and its beginning cast to, each format."""
    rounded = [round_fp8(v, fp8_dtype) for fp8_dtype in FORMATS]
    return rounded + [saturating_cast(tail, fp8_dtype) for fp8_dtype in FORMATS]


@pytest.mark.parametrize("compiled", [False, True])
def test_rounding_is_to_the_nearest_number_and_the_cast_saturates(compiled: bool) -> None:
    v = words()
    assert v.isnan().any() and v.isinf().any() and (v == 0).any()
    tail = v[: 1 + 32 * 100_000]  # a tail past the last vector
    found = (torch.compile(round_all, fullgraph=True) if compiled else round_all)(v, tail)
    for values, fp8_dtype in zip(found[:2], FORMATS, strict=True):
        assert_same(values, expected(v, fp8_dtype))
    for values, fp8_dtype in zip(found[2:], FORMATS, strict=True):
        assert values.dtype is fp8_dtype
        assert_same(values.float(), expected(tail, fp8_dtype))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["float32", "pow2", "e8m0"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_blocks_round_as_they_are_quantized(fp8_dtype: torch.dtype, kind: str) -> None:
    """By blocks of all shapes, ragged, with a NaN and an infinity: eager and compiled."""
    x = torch.randn(70, 75, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:, 40] *= 1e-6
    x[3, 5], x[50, 70], x[0, 0] = float("nan"), float("-inf"), -0.0
    cases = [((1, 32), torch.bfloat16), ((32, 1), torch.float32), ((32, 32), torch.bfloat16)]

    def rounded(x: torch.Tensor) -> list[torch.Tensor]:
        return [q.round_blockwise(x, block, fp8_dtype, kind, dtype) for block, dtype in cases]

    compiled = torch.compile(rounded, fullgraph=True)(x)
    for (block, dtype), eager, other in zip(cases, rounded(x), compiled, strict=True):
        wanted = q.dequantize_blockwise(*q.quantize_blockwise(x, block, fp8_dtype, kind), block, dtype).float()
        assert_same(eager.float(), wanted)
        assert_same(other.float(), wanted)
    assert rounded(x[:0])[0].shape == (0, 75)


@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_a_tensor_rounds_as_it_is_quantized(fp8_dtype: torch.dtype) -> None:
    x = torch.randn(64, 80, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = torch.tensor(123.4)
    assert_same(q.round_per_tensor(x, scale, fp8_dtype), q.quantize_per_tensor(x, scale, fp8_dtype).float())


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(64, 128), (1, 128), (33, 128), (64, 75), (2, 32, 64), (2, 5, 64), (0, 64)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "pow2", "e8m0"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_quantizing_and_rounding_at_once_is_both(fp8_dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    """Eagerly by look-up: whole blocks, fewer rows than a block has, ragged ones, transposed and float32 matrices."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    if x.numel():
        x[..., 0, 3], x[..., 0, 40], x[..., -1, 9], x[..., -1, 20] = float("nan"), float("-inf"), -0.0, 1e-38
        x[..., 0, 32:40] = 0.0
    epsilon = 0.0 if kind == "e8m0" else 0.25
    for values in (x, x.half(), x.float(), x.mT):
        for block in ((1, 32), (32, 1), (32, 32)):
            wanted = q.quantize_blockwise_both(values, block, fp8_dtype, kind, epsilon=epsilon)
            rounded = q.dequantize_blockwise(wanted[0], wanted[1], block, torch.bfloat16)
            for both in (False, True):
                options = {"epsilon": epsilon, "both": both}
                found, parts = q.quantize_and_round(values, block, fp8_dtype, kind, torch.bfloat16, **options)
                assert_same(found.float(), rounded.float())
                assert len(parts) == (4 if both else 2)
                for part, expected_part in zip(parts, wanted, strict=False):
                    assert part.dtype == expected_part.dtype and part.shape == expected_part.shape
                    assert_same(part.float(), expected_part.float())
