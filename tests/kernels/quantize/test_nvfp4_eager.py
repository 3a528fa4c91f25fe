"""NVFP4 in eager mode on CPU, by integer arithmetic a few rows at a time, has the bits of its definition."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels.quantize import hadamard, random
from te_models.kernels.quantize.fp8 import blocks
from te_models.kernels.quantize.nvfp4 import cpu as nvfp4_eager
from te_models.kernels.quantize.nvfp4 import reference as nvfp4

BLOCKS = [(1, 16), (16, 16), (16, 1)]


@pytest.fixture
def by_definition(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call a function where nothing counts as computed eagerly."""

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in (nvfp4_eager, blocks, hadamard, random):
                patch.setattr(module, "eager_on_cpu", lambda x: False)
            return function(*args, **options)

    return call


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def every_case(dtype: torch.dtype) -> Tensor:
    """Three matrices of normal numbers; one has zeros of either sign, an infinity, denormals and large numbers, too."""
    x = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0))
    x[1, :16] = 0.0
    x[1, 16:32] *= -0.0
    x[1, 40, 5], x[1, 50, 6] = float("inf"), -float("inf")
    x[1, 64:80] *= torch.finfo(dtype).smallest_normal
    x[1, 80:] = torch.finfo(dtype).max / 7
    return x.to(dtype)


def next_to_codes() -> Tensor:
    """All float32 numbers within 64 places of codes and of their middles, and as many random, either sign, [N, 16]."""
    values = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 1e30, float("inf")])
    near = (values.view(torch.int32)[:, None] + torch.arange(-64, 65, dtype=torch.int32)).clamp(0, 0x7F800000)
    random = torch.rand(near.numel(), generator=torch.Generator().manual_seed(0)) * 8
    x = torch.cat((near.flatten().view(torch.float32), random))
    x = torch.cat((x, -x))
    return x[: len(x) // 16 * 16].view(-1, 16)


def test_every_number_next_to_a_tie() -> None:
    x = next_to_codes()
    packed = nvfp4_eager.packed_codes(x, torch.ones(len(x), 1), (1, 16))
    assert torch.equal(nvfp4.unpack(packed, 16), nvfp4.encode_e2m1(x.clamp(-6.0, 6.0)))


def test_random_rounding_next_to_a_tie_and_to_the_fraction() -> None:
    """Random numbers 0, the largest, those next to 1/2 and to the fraction itself, and any."""
    x = next_to_codes()
    steps = x.abs().clamp(max=6.0) * 2
    fraction = ((steps - steps.floor()) * 2**24).long()
    any_bits = random.random_bits(torch.tensor([1, 2]), 0, x.shape)
    below = [fraction - 1, fraction, fraction + 1]
    draws = [torch.full_like(fraction, n) for n in (0, 2**23 - 1, 2**23, 2**24 - 1)] + below
    for draw in (*((n.clamp(0, 2**24 - 1) << 8).to(torch.int32) for n in draws), any_bits):
        packed = nvfp4_eager.packed_codes(x, torch.ones(len(x), 1), (1, 16), draw)
        assert torch.equal(nvfp4.unpack(packed, 16), nvfp4.encode_e2m1(x.clamp(-6.0, 6.0), draw))


@pytest.mark.parametrize("at_once", [3, 1 << 15])
@pytest.mark.parametrize("size", [0, 1, 4, 70_001])
@pytest.mark.parametrize("key", [(1, 2), (-5, 2**40 + 3), (2**62 + 7, -1)], ids=str)
def test_random_bits_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, by_definition: Callable[..., Any], key: tuple[int, int], size: int, at_once: int
) -> None:
    monkeypatch.setattr(random, "_AT_ONCE", at_once if size < 1000 else 1 << 14)
    for stream in (0, 7, 2**32 - 1):
        arguments = (torch.tensor(key), stream, (size,))
        got, expected = random.random_bits(*arguments), by_definition(random.random_bits, *arguments)
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.sentinels("torch.bfloat16-small tiles", "torch.float16-one tile", "torch.float32-one tile")
@pytest.mark.parametrize("tile", [1, 1 << 18], ids=["small tiles", "one tile"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantizing_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, by_definition: Callable[..., Any], dtype: torch.dtype, tile: int
) -> None:
    monkeypatch.setattr(nvfp4_eager, "_TILE", tile)
    x, keys = every_case(dtype), (None, torch.tensor([3, 4]))
    for given, key in itertools.product((x, x.mT, x[:, ::2, :32], x[0].contiguous(), torch.nn.Parameter(x[1])), keys):
        for rows in (1, 16):
            got = nvfp4_eager.quantize_nvfp4(given, block_rows=rows, key=key)
            expected = by_definition(nvfp4.quantize_nvfp4, given, block_rows=rows, key=key)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))
            values = nvfp4_eager.decode_blocks(*got[:2], given.shape[-1])
            assert torch.equal(bits(values), bits(by_definition(nvfp4.decode_blocks, *got[:2], given.shape[-1])))
        for block in BLOCKS:
            for into in (torch.bfloat16, torch.float32):
                got = nvfp4_eager.round_nvfp4(given, into, block=block, key=key)
                expected = by_definition(nvfp4.round_nvfp4, given, into, block=block, key=key)
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


def test_what_the_short_way_does_not_take(by_definition: Callable[..., Any]) -> None:
    """NaN, ragged edges, tensors that are differentiated: the definition serves them."""
    x = every_case(torch.float32)[0]
    for given in (x.clone().index_fill_(1, torch.tensor([3]), float("nan")), x[:, :60], x[:61]):
        for rows in (1, 16):
            got = nvfp4_eager.quantize_nvfp4(given, block_rows=rows)
            expected = by_definition(nvfp4.quantize_nvfp4, given, block_rows=rows)
            assert torch.equal(got[0], expected[0]) and torch.equal(bits(got[1]), bits(expected[1]))
    assert nvfp4_eager.uses_nvfp4_library(x, (1, 16))
    for given in (x.double(), x.clone().requires_grad_(), x.to("meta"), x[:, :60], x[:0]):
        assert not nvfp4_eager.uses_nvfp4_library(given, (1, 16))
    with pytest.raises(ValueError, match="block_rows is 2; allowed: 1, 16"):
        nvfp4_eager.quantize_nvfp4(x, block_rows=2)


def test_codes_and_scales_lie_row_by_row() -> None:
    x = every_case(torch.bfloat16)
    for given, rows in ((x, 16), (x.mT, 1), (x[0].t(), 1)):
        assert all(part.is_contiguous() for part in nvfp4_eager.quantize_nvfp4(given, block_rows=rows))


def test_the_transform_by_stages_is_the_definition(by_definition: Callable[..., Any]) -> None:
    x = every_case(torch.bfloat16)
    x[1, 40, 5] = x[1, 50, 6] = 3e38  # sums that overflow stay: an infinity less one would be NaN
    for given in (x, x.mT, x[:, 3:50, 7:30], x[0, ::3], x[:0], torch.nn.Parameter(x[2])):
        for dim in (-1, -2):
            got, expected = hadamard.random_hadamard(given, dim), by_definition(hadamard.random_hadamard, given, dim)
            assert got.shape == expected.shape and got.stride() == expected.stride()
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(bits(got.nan_to_num(7.0)), bits(expected.nan_to_num(7.0)))


def test_every_byte_and_every_scale_decode() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous().view(torch.float8_e4m3fn)
    got = nvfp4_eager.decoded_blocks(packed, scales)
    expected = nvfp4.decode_e2m1(nvfp4.unpack(packed, 512)) * scales.float()[:, :1]
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(bits(got.nan_to_num()), bits(expected.nan_to_num()))
    turned = nvfp4_eager.decoded_blocks(packed.t().contiguous().t(), scales)  # how a columnwise copy lies
    assert torch.equal(bits(turned.nan_to_num()), bits(got.nan_to_num()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(1, 16), (1, 32), (1, 128), (32, 1), (16, 16), (128, 128)], ids=str)
def test_amaxes_are_defined(by_definition: Callable[..., Any], dtype: torch.dtype, block: tuple[int, int]) -> None:
    for x in (every_case(dtype), every_case(dtype).mT[:, 3:, 5:], every_case(dtype)[:, 7:8]):
        assert torch.equal(blocks.blockwise_amax(x, block), by_definition(blocks.blockwise_amax, x, block))
        assert torch.equal(blocks.amax(x), by_definition(blocks.amax, x))
    x = every_case(dtype)
    x[2, 3, 4] = float("nan")
    found, expected = blocks.blockwise_amax(x, block), by_definition(blocks.blockwise_amax, x, block)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert blocks.amax(x).isnan().tolist() == [False, False, True]
