"""FP8 quantization kernels have the bits of the reference: data, scales and amax, every format and both copies."""

import pytest
import torch

from te_models.kernels import launch
from te_models.kernels.quantize.fp8 import blocks, grouped, op, reference
from tests.covering import EVERYDAY
from tests.kernels.triton.quantize.quantize_cases import (
    BLOCKS,
    E4M3,
    E5M2,
    LENGTHS,
    SHAPES,
    SPLITS,
    assert_all,
    assert_bitwise,
    hard,
    ordinary,
    signed_zeros,
    special,
)

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the public functions take the kernels' way, also on CPU."""
    monkeypatch.setattr(launch, "as_accelerator", True)


@pytest.mark.parametrize("value", [0.0, 1e-12, 0.1, 448.0, 1e-45, 3.4e38])
def test_epsilon_is_no_tensor(value, device) -> None:
    """Where new tensors are made on a GPU, its bits would be, and the host would wait for them in every launch."""
    from te_models.kernels.quantize.triton_rounding import float32_bits

    with torch.device("meta"):
        bits = float32_bits(value)
    assert bits == torch.tensor(value, device="cpu").view(torch.int32).item()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block, kind", BLOCKS, ids=str)
def test_blockwise(block, kind, dtype, device) -> None:
    for seed, shape in enumerate(SHAPES):
        for x in (hard(shape, dtype, seed), signed_zeros(shape, dtype)):
            got = op.quantize_blockwise_both(x.to(device), block, E4M3, kind)
            assert_all(got, reference.quantize_blockwise_both(x, block, E4M3, kind))


@pytest.mark.sentinels("(1, 32)-e8m0")
@pytest.mark.parametrize("block, kind", [BLOCKS[0], BLOCKS[2], BLOCKS[4], BLOCKS[5]], ids=str)
def test_lengths(block, kind, device) -> None:
    for length in LENGTHS[1::3] if EVERYDAY[0] else LENGTHS:
        for shape in ((2, length), (length, 2)):
            x = ordinary(shape, torch.bfloat16)
            got = op.quantize_blockwise_both(x.to(device), block, E4M3, kind)
            assert_all(got, reference.quantize_blockwise_both(x, block, E4M3, kind))


@pytest.mark.parametrize("block, kind", [*BLOCKS, ((128, 1), "pow2"), ((32, 1), "e8m0")], ids=str)
def test_one_copy(block, kind, device) -> None:
    x = hard((40, 140), torch.bfloat16)
    for fp8_dtype in (E4M3, E5M2):
        got = op.quantize_blockwise(x.to(device), block, fp8_dtype, kind)
        assert_all(got, reference.quantize_blockwise(x, block, fp8_dtype, kind))


@pytest.mark.parametrize("block, kind", BLOCKS, ids=str)
def test_special_values(block, kind, device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = special((72, 128), torch.float32 if dtype == torch.float16 else dtype)
        x = x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x
        got = op.quantize_blockwise_both(x.to(device), block, E4M3, kind)
        assert_all(got, reference.quantize_blockwise_both(x, block, E4M3, kind))


@pytest.mark.parametrize("kind", ["pow2", "float32"])
def test_epsilon(kind, device) -> None:
    x = torch.linspace(0, 1e-3, 4 * 128).view(4, 128)
    got = op.quantize_blockwise_both(x.to(device), (1, 128), E4M3, kind, epsilon=3e-4)
    assert_all(got, reference.quantize_blockwise_both(x, (1, 128), E4M3, kind, epsilon=3e-4))


def test_every_significand_has_the_reference_power_of_two(device) -> None:
    """The exponent of 448 / amax comes from a comparison of significands, not from a division."""
    near = torch.arange(-50, 50) if EVERYDAY[0] else torch.arange(-300, 300)
    amax = torch.cat([0x3F800000 + near, 0x3FE00000 + near]).to(torch.int32)
    exponents = torch.tensor([-126, -118, 0, 119, 127])
    x = (amax.view(torch.float32)[None] * 2.0 ** exponents[:, None].float()).flatten()
    x = torch.cat([x[torch.isfinite(x)], torch.tensor([0.0, 2.0**-149, 2.0**-127, torch.finfo(torch.float32).max])])
    for fp8_dtype in (E4M3, E5M2):
        got = op.quantize_blockwise(x[:, None].to(device), (1, 128), fp8_dtype, "pow2")
        assert_all(got, reference.quantize_blockwise(x[:, None], (1, 128), fp8_dtype, "pow2"))


@pytest.mark.matrix
@pytest.mark.parametrize("block, kind", [BLOCKS[0], BLOCKS[2], BLOCKS[4], BLOCKS[5]], ids=str)
@pytest.mark.parametrize("splits, rows", SPLITS, ids=str)
def test_grouped_blockwise(splits, rows, block, kind, device) -> None:
    x, m_splits = hard((rows, 40), torch.bfloat16), torch.tensor(splits)
    got = op.quantize_grouped_blockwise(x.to(device), m_splits.to(device), block, E4M3, kind)
    assert_all(got, grouped.quantize_grouped_blockwise(x, m_splits, block, E4M3, kind))


def test_grouped_blockwise_makes_the_copy_asked_for(device) -> None:
    x, m_splits = hard((70, 40), torch.float32), torch.tensor([33, 37], dtype=torch.int32)
    for rowwise, columnwise in ((True, False), (False, True)):
        flags = {"rowwise": rowwise, "columnwise": columnwise}
        got = op.quantize_grouped_blockwise(x.to(device), m_splits.to(device), (1, 32), E4M3, "e8m0", **flags)
        assert_all(got, grouped.quantize_grouped_blockwise(x, m_splits, (1, 32), E4M3, "e8m0", **flags))


@pytest.mark.matrix
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (70, 130), (2, 66, 40), (0, 5)], ids=str)
def test_per_tensor(shape, fp8_dtype, device) -> None:
    x = hard(shape, torch.bfloat16)
    for scale_shape in ((), (*shape[:-2], 1, 1), (*shape[:-1], 1), shape[-1:], shape):
        scale = torch.rand(scale_shape, generator=torch.Generator().manual_seed(0)) + 0.1
        expected = reference.quantize_per_tensor(x, scale, fp8_dtype)
        data = op.quantize_per_tensor(x.to(device), scale.to(device), fp8_dtype)
        assert_bitwise(data, expected)
        values = op.dequantize_per_tensor(data, scale.to(device), torch.bfloat16)
        assert_bitwise(values, reference.dequantize_per_tensor(expected, scale, torch.bfloat16))


@pytest.mark.sentinels("[5, 0, 30]-40-False", "[64]-64-True", "[0, 0]-20-True", "[0, 0, 0]-0-False")
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("splits, rows", SPLITS, ids=str)
def test_grouped_per_tensor(splits, rows, columnwise, device) -> None:
    x, m_splits = special((135, 128), torch.float32)[:rows], torch.tensor(splits)
    assert_bitwise(op.grouped_amax(x.to(device), m_splits.to(device)), grouped.grouped_amax(x, m_splits))
    scale = torch.rand(len(splits)) + 0.1
    moved = [t.to(device) for t in (x, m_splits, scale)]
    got = op.quantize_grouped_per_tensor(*moved, E4M3, columnwise=columnwise)
    assert len(got) == 1 + columnwise
    assert_all(got, grouped.quantize_grouped_per_tensor(x, m_splits, scale, E4M3, columnwise=columnwise))


@pytest.mark.sentinels("(70, 130)", "(1, 1100)", "(1, 1)", "(0, 5)", "(3, 0)")
@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (2, 66, 40), (3, 2, 5, 7), (1, 1100), (0, 5), (3, 0)], ids=str)
def test_amax(shape, device) -> None:
    for dtype in DTYPES:
        x = hard(shape, dtype)
        assert_bitwise(op.amax(x.to(device)), blocks.amax(x))
    if x.numel():
        x.view(-1)[-1] = float("nan")
        assert_bitwise(op.amax(x.to(device)), blocks.amax(x))


@pytest.mark.matrix
@pytest.mark.parametrize("block, kind", [*BLOCKS, ((128, 1), "pow2"), ((32, 1), "e8m0")], ids=str)
def test_dequantize(block, kind, device) -> None:
    for shape in ((40, 140), (2, 33, 5)):
        data, stored = reference.quantize_blockwise(hard(shape, torch.float32), block, E5M2, kind)
        for dtype in DTYPES:
            expected = reference.dequantize_blockwise(data, stored, block, dtype)
            for given in (data.to(device), data.mT.contiguous().mT.to(device)):
                assert_bitwise(op.dequantize_blockwise(given, stored.to(device), block, dtype), expected)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
def test_every_code_dequantizes(fp8_dtype, device) -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8_dtype).view(8, 32)
    got = op.dequantize_per_tensor(data.to(device), torch.ones((), device=device), torch.float32)
    assert_bitwise(got, data.float())


def test_every_bfloat16_rounds_alike(device) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for fp8_dtype in (E4M3, E5M2):
        for scale in (torch.ones(()), torch.tensor(1.7)):
            got = op.quantize_per_tensor(every.to(device), scale.to(device), fp8_dtype)
            assert_bitwise(got, reference.quantize_per_tensor(every, scale, fp8_dtype))


def test_strided_input(device) -> None:
    x = hard((40, 66), torch.float32)
    got = op.quantize_blockwise(x.to(device).mT, (1, 32), E4M3, "e8m0")
    assert_all(got, reference.quantize_blockwise(x.mT, (1, 32), E4M3, "e8m0"))


def test_blocks_that_no_tile_holds_are_refused(device) -> None:
    with pytest.raises(ValueError, match="allowed on an accelerator: powers of two up to 128"):
        op.quantize_blockwise(torch.ones(4, 4, device=device), (1, 256), E4M3, "pow2")


REAL = [(8192, 4096), (4097, 7168), (8, 2048, 1408)]


@pytest.mark.gpu
@pytest.mark.parametrize("block, kind", BLOCKS, ids=str)
def test_real_sizes(block, kind) -> None:
    for shape in REAL:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 3
        x.view(-1)[::1001] *= 1e-30
        got = op.quantize_blockwise_both(x, block, E4M3, kind)
        assert_all(got, reference.quantize_blockwise_both(x, block, E4M3, kind))


@pytest.mark.gpu
def test_offsets_beyond_31_bits() -> None:
    x = torch.zeros(2**20 + 3, 2049, device="cuda", dtype=torch.bfloat16)
    x[-2:] = torch.randn(2, 2049, device="cuda", dtype=torch.bfloat16)
    data, scale = op.quantize_blockwise(x, (1, 128), E4M3, "pow2")
    assert_all((data[-2:], scale[-2:]), reference.quantize_blockwise(x[-2:], (1, 128), E4M3, "pow2"))
    assert torch.equal(op.amax(x), x[-2:].abs().amax().float())


@pytest.mark.gpu
def test_grouped_real_sizes() -> None:
    splits = [1000, 0, 129, 4096, 1, 2966]
    m_splits = torch.tensor(splits, device="cuda")
    x = torch.randn(sum(splits), 2048, device="cuda", dtype=torch.bfloat16)
    for block, kind in (((1, 128), "pow2"), ((1, 32), "e8m0")):
        got = op.quantize_grouped_blockwise(x, m_splits, block, E4M3, kind)
        assert_all(got, grouped.quantize_grouped_blockwise(x, m_splits, block, E4M3, kind))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL, ids=str)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
def test_per_tensor_real_sizes(fp8_dtype, shape, device) -> None:
    """... and back, from data that lies transposed in memory, too."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16) * 3
    x.view(-1)[::1001] *= 1e-30
    scale = torch.rand((*shape[:-2], 1, 1), device=device) * 100 + 20
    expected = reference.quantize_per_tensor(x, scale, fp8_dtype)
    row = op.quantize_per_tensor(x, scale, fp8_dtype)
    assert_bitwise(row, expected)
    col = row.mT.contiguous().mT
    for dtype in DTYPES:
        values = reference.dequantize_per_tensor(expected, scale, dtype)
        for copy in (row, col):
            assert_bitwise(op.dequantize_per_tensor(copy, scale, dtype), values)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL, ids=str)
@pytest.mark.parametrize("block, kind", [*BLOCKS, ((128, 1), "pow2"), ((32, 1), "e8m0")], ids=str)
def test_dequantize_real_sizes(block, kind, shape, device) -> None:
    x = torch.randn(shape, device=device, dtype=torch.bfloat16) * 3
    data, stored = reference.quantize_blockwise(x, block, E4M3, kind)
    for dtype in DTYPES:
        expected = reference.dequantize_blockwise(data, stored, block, dtype)
        for given in (data, data.view(torch.uint8).mT.contiguous().mT.view(E4M3)):
            assert_bitwise(op.dequantize_blockwise(given, stored, block, dtype), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("splits, columns", [([1000, 0, 129, 4096, 1, 2966], 2048)], ids=["six groups"])
def test_grouped_per_tensor_real_sizes(splits, columns, device) -> None:
    """Rows past the last group come along."""
    m_splits = torch.tensor(splits, device=device)
    x = torch.randn(sum(splits) + 77, columns, device=device, dtype=torch.bfloat16) * 3
    assert_bitwise(op.grouped_amax(x, m_splits), grouped.grouped_amax(x, m_splits))
    scale = torch.rand(len(splits), device=device) * 100 + 20
    for fp8_dtype in (E4M3, E5M2):
        got = op.quantize_grouped_per_tensor(x, m_splits, scale, fp8_dtype)
        assert_all(got, grouped.quantize_grouped_per_tensor(x, m_splits, scale, fp8_dtype))
