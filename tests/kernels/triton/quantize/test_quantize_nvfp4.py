"""NVFP4 kernels have the bits of the reference: codes, scales and amaxes of both copies, grouped or not, and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels import launch
from te_models.kernels.quantize import hadamard
from te_models.kernels.quantize.nvfp4 import copies as nvfp4_copies
from te_models.kernels.quantize.nvfp4 import op as op_nvfp4
from te_models.kernels.quantize.nvfp4 import reference as nvfp4
from te_models.kernels.quantize.random import random_bits
from tests.covering import EVERYDAY
from tests.kernels.triton.quantize.quantize_cases import (
    LENGTHS,
    SPLITS,
    assert_all,
    assert_bitwise,
    hard,
    ordinary,
    signed_zeros,
    special,
)

pytestmark = pytest.mark.usefixtures("poisoned")

BF16 = torch.bfloat16
# more than one tile of 128 x 128 in either direction, ragged in blocks, pairs and fours; batches; one element; nothing
SHAPES = [(1, 1), (15, 17), (33, 140), (2, 31, 20), (3, 2, 16, 32), (130, 7), (0, 16), (3, 0)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> None:
    """Let the public functions take the kernels' way, also on CPU."""
    monkeypatch.setattr(launch, "as_accelerator", True)


def key_on(device: torch.device, step: int = 2**33 + 5) -> Tensor:
    return torch.tensor([-(2**40) - 3, step], device=device)


def both_copies(of: Any, x: Tensor, *, with_rht: bool, key: Tensor | None = None, streams: tuple = (0, 1)) -> tuple:
    """The rowwise copy and the columnwise one, as two functions of a module make them."""
    row = of.quantize_nvfp4(x, key=key, stream=streams[0])
    return row + of.quantize_nvfp4_transposed(x, with_rht=with_rht, key=key, stream=streams[1])


def on_cpu(key: Tensor | None) -> Tensor | None:
    return None if key is None else key.cpu()


@pytest.mark.sentinels("(2, 31, 20)-1", "(15, 17)-16", "(0, 16)-1")
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rowwise(shape, block_rows, device) -> None:
    for dtype in (torch.float32, BF16, torch.float16):
        wild = hard(shape, torch.float32, sum(shape)).clamp(-6e4, 6e4).to(dtype)
        for x in (wild, ordinary(shape, dtype), signed_zeros(shape, dtype)):
            got = op_nvfp4.quantize_nvfp4(x.to(device), block_rows=block_rows)
            assert_all(got, nvfp4.quantize_nvfp4(x, block_rows=block_rows))


@pytest.mark.sentinels("(130, 7)-plain", "(15, 17)-rht", "(0, 16)-plain")
@pytest.mark.parametrize("with_rht", [False, True], ids=["plain", "rht"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_copies(shape, with_rht, device) -> None:
    for x in (hard(shape, torch.float32, sum(shape)), ordinary(shape, torch.float32), signed_zeros(shape, BF16)):
        expected = both_copies(nvfp4_copies, x, with_rht=with_rht)
        assert_all(both_copies(op_nvfp4, x.to(device), with_rht=with_rht), expected)


@pytest.mark.sentinels("1", "17", "31", "129")
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, device) -> None:
    for shape in ((3, length), (length, 3)):
        x = ordinary(shape, BF16)
        got = both_copies(op_nvfp4, x.to(device), with_rht=True)
        assert_all(got, both_copies(nvfp4_copies, x, with_rht=True))


def test_special_values(device) -> None:
    for dtype in (torch.float32,) if EVERYDAY[0] else (torch.float32, BF16):
        full = special((72, 128), dtype)
        for x in (full, full.nan_to_num(nan=1.0), full.nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)):
            for block_rows in (1, 16):
                got = op_nvfp4.quantize_nvfp4(x.to(device), block_rows=block_rows)
                assert_all(got, nvfp4.quantize_nvfp4(x, block_rows=block_rows))
            for with_rht in (False, True):
                got = both_copies(op_nvfp4, x.to(device), with_rht=with_rht)
                assert_all(got, both_copies(nvfp4_copies, x, with_rht=with_rht))


def test_every_tie_and_every_half_step(device) -> None:
    """Blocks with amax 6 and an exact scale of 1 round every multiple of 1/8 and its float32 neighbours."""
    grid = torch.arange(-48, 49) / 8
    below, above = torch.nextafter(grid, torch.tensor(-9.0)), torch.nextafter(grid, torch.tensor(9.0))
    values = torch.cat([grid, below, above]).clamp(-6, 6)
    x = torch.full((-(-values.numel() // 15), 16), 6.0)
    x[:, 1:].reshape(-1)[: values.numel()] = 0
    x[:, 1:] = torch.nn.functional.pad(values, (0, x.shape[0] * 15 - values.numel())).view(-1, 15)
    amax = torch.tensor(448.0 * 6)
    packed, scales, _ = op_nvfp4.quantize_nvfp4(x.to(device), amax=amax.to(device))
    assert_all((packed, scales), nvfp4.quantize_nvfp4(x, amax=amax)[:2])
    assert (scales.float() == 1).all()


@pytest.mark.sentinels("(17, 6)")
@pytest.mark.parametrize("shape", [(5, 20), (2, 18, 33), (17, 6), (20, 130)], ids=str)
def test_stochastic_rounding_draws_the_reference_bits(shape, device) -> None:
    x, key = ordinary(shape, BF16), key_on(device)
    for block_rows in (1, 16):
        got = op_nvfp4.quantize_nvfp4(x.to(device), block_rows=block_rows, key=key, stream=2**32 - 1)
        expected = nvfp4.quantize_nvfp4(x, block_rows=block_rows, key=key.cpu(), stream=2**32 - 1)
        assert_all(got, expected)
    for with_rht in (False, True):
        got = both_copies(op_nvfp4, x.to(device), with_rht=with_rht, key=key, streams=(7, 9))
        expected = both_copies(nvfp4_copies, x, with_rht=with_rht, key=key.cpu(), streams=(7, 9))
        assert_all(got, expected)
    other = op_nvfp4.quantize_nvfp4(x.to(device), key=key_on(device, 6))
    assert not torch.equal(other[0].cpu(), nvfp4.quantize_nvfp4(x, key=key.cpu())[0])


def test_amax_of_blocks(device) -> None:
    """Matrices that lie side by side: an amax per block row, or per block."""
    x = ordinary((40, 50), torch.float32)
    for rows, amax in ((1, torch.rand(40, 1)), (1, torch.rand(40, 4)), (16, torch.rand(3, 1)), (1, torch.rand(1, 4))):
        got = op_nvfp4.quantize_nvfp4(x.to(device), block_rows=rows, amax=amax.to(device))
        assert_all(got, nvfp4.quantize_nvfp4(x, block_rows=rows, amax=amax))


@pytest.mark.sentinels("[5, 0, 30]-40-rht-stochastic", "[64]-64-plain-nearest", "[0, 0, 0]-0-plain-nearest")
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("with_rht", [False, True], ids=["plain", "rht"])
@pytest.mark.parametrize("splits, rows", SPLITS, ids=str)
def test_grouped(splits, rows, with_rht, stochastic, device) -> None:
    x, m_splits = ordinary((rows, 36), BF16), torch.tensor(splits)
    key = key_on(device) if stochastic else None
    got = op_nvfp4.quantize_grouped_nvfp4(x.to(device), m_splits.to(device), with_rht=with_rht, key=key)
    flags = {"with_rht": with_rht, "key": on_cpu(key)}
    assert_all(got, nvfp4_copies.quantize_grouped_nvfp4(x, m_splits, **flags))


def test_grouped_makes_the_copy_asked_for(device) -> None:
    x, m_splits = ordinary((70, 40), torch.float32), torch.tensor([33, 37], dtype=torch.int32)
    for rowwise, columnwise in ((True, False), (False, True)):
        flags = {"rowwise": rowwise, "columnwise": columnwise, "with_rht": True}
        got = op_nvfp4.quantize_grouped_nvfp4(x.to(device), m_splits.to(device), **flags)
        assert_all(got, nvfp4_copies.quantize_grouped_nvfp4(x, m_splits, **flags))


def test_grouped_copies_are_those_of_the_groups(device) -> None:
    """The reference itself: each group's part equals what quantizing the group alone gives."""
    x, splits = ordinary((70, 40), BF16), [33, 0, 37]
    row, row_scale, row_amax, col, col_scale, col_amax = nvfp4_copies.quantize_grouped_nvfp4(
        x, torch.tensor(splits), with_rht=True
    )
    row_begin, slot = 0, 0
    for group, count in enumerate(splits):
        alone = both_copies(nvfp4_copies, x[row_begin : row_begin + count], with_rht=True)
        rows, width = slice(row_begin, row_begin + count), -(-count // 16) * 16
        got = (row[rows], row_scale[rows], row_amax[group])
        got += (col[:, slot // 2 : (slot + width) // 2], col_scale[:, slot // 16 : (slot + width) // 16])
        assert_all((*got, col_amax[group]), alone)
        row_begin, slot = row_begin + count, slot + width


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
def test_random_hadamard(shape, dim, device) -> None:
    for x in (hard(shape, BF16, 5), ordinary(shape, BF16), signed_zeros(shape, BF16)):
        assert_bitwise(op_nvfp4.random_hadamard(x.to(device), dim), hadamard.random_hadamard(x, dim))
    with pytest.raises(ValueError, match="takes bfloat16"):
        op_nvfp4.random_hadamard(x.float().to(device), dim)


@pytest.mark.sentinels("(33, 140)", "(2, 31, 20)", "(15, 17)", "(3, 0)", "(1, 1)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize(shape, device) -> None:
    packed, scales, amax = nvfp4.quantize_nvfp4(ordinary(shape, torch.float32))
    moved = packed.to(device), scales.to(device)
    columns = shape[-1]
    assert_bitwise(op_nvfp4.decode_blocks(*moved, columns), nvfp4.decode_blocks(packed, scales, columns))
    for one in (amax, torch.rand(*shape[:-1], 1)):
        for dtype in (torch.float32, BF16):
            got = op_nvfp4.dequantize_nvfp4(*moved, one.to(device), columns, dtype)
            assert_bitwise(got, nvfp4.dequantize_nvfp4(packed, scales, one, columns, dtype))


def test_every_code_and_scale_decodes(device) -> None:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].expand(256, 8).contiguous()
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].view(torch.float8_e4m3fn)
    got = op_nvfp4.decode_blocks(packed.to(device), scales.to(device), 16)
    assert_bitwise(got, nvfp4.decode_blocks(packed, scales, 16))


def test_wrong_block_is_refused(device) -> None:
    with pytest.raises(ValueError, match="block_rows is 2; allowed: 1, 16"):
        op_nvfp4.quantize_nvfp4(torch.ones(4, 16, device=device), block_rows=2)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(4096, 4096), (1001, 7168), (4, 1024, 1408)], ids=str)
def test_real_sizes(shape, stochastic) -> None:
    x = torch.randn(shape, device="cuda", dtype=BF16) * 3
    x.view(-1)[::1001] *= 1e-3
    key = key_on(x.device) if stochastic else None
    for with_rht in (False, True):
        got = both_copies(op_nvfp4, x, with_rht=with_rht, key=key)
        assert_all(got, both_copies(nvfp4_copies, x, with_rht=with_rht, key=key))
    assert_all(op_nvfp4.quantize_nvfp4(x, block_rows=16), nvfp4.quantize_nvfp4(x, block_rows=16))
    packed, scales, amax = got[:3]
    decoded = op_nvfp4.dequantize_nvfp4(packed, scales, amax, shape[-1], BF16)
    assert_bitwise(decoded, nvfp4.dequantize_nvfp4(packed, scales, amax, shape[-1], BF16))


@pytest.mark.gpu
def test_grouped_real_sizes_without_synchronisation() -> None:
    splits = [1000, 0, 129, 4096, 1, 2966]
    m_splits = torch.tensor(splits, device="cuda")
    x = torch.randn(sum(splits), 2048, device="cuda", dtype=BF16)
    op_nvfp4.quantize_grouped_nvfp4(x, m_splits, with_rht=True)  # compiles and measures tiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = op_nvfp4.quantize_grouped_nvfp4(x, m_splits, with_rht=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_all(got, nvfp4_copies.quantize_grouped_nvfp4(x, m_splits, with_rht=True))


@pytest.mark.gpu
def test_random_bits_do_not_depend_on_the_device() -> None:
    key = key_on(torch.device("cuda"))
    assert_bitwise(random_bits(key, 3, (1001, 77)), random_bits(key.cpu(), 3, (1001, 77)))
