"""The fields of the NVFP4 quantizer equal, bit for bit, an emulation that shares no code with it."""

import numpy as np
import pytest
import torch

from te_models.kernels.quantize import quantize_nvfp4, random_bits, random_hadamard, transpose_nvfp4
from te_models.kernels.quantize.random import philox
from te_models.layers.quantizer import NVFP4Quantizer
from tests.layers import emulation_nvfp4 as em
from tests.layers.emulation import E4M3
from tests.layers.quantizer.inputs import DTYPES, NAMES, matrices

pytestmark = pytest.mark.usefixtures("each_backend")

SEED, STEP = -(2**40) - 12345, 2**33 + 7
CASES = {
    "1x16": NVFP4Quantizer(),
    "16x16": NVFP4Quantizer(with_2d_quantization=True),
    "RHT": NVFP4Quantizer(with_rht=True),
    "stochastic": NVFP4Quantizer(stochastic_rounding=True),
    "RHT stochastic": NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
}
SUMMABLE = [n for n in NAMES if n not in ("every exponent", "ties E5M2")]
"""Inputs that `summable` makes exact; the others spread over too many binary places."""


def summable(values: np.ndarray) -> np.ndarray:
    """Numbers whose sums of 16 float32 holds exactly, so that the order of the additions does not matter: at most
    2^110, and whole multiples of 2^-12 below 8. Infinities and NaN stay."""
    bounded = np.where(np.isfinite(values), np.clip(values, -(2.0**110), 2.0**110), values)
    return np.where(np.abs(bounded) < 8, np.round(bounded * 4096) / 4096, bounded).astype(np.float32)


def emulated(quantizer: NVFP4Quantizer, usage: str, x: np.ndarray) -> em.Packed:
    """The copy of a usage, in storage layout."""
    if usage == "columnwise":
        x = em.rotate(em.to_bfloat16(x.T)) if quantizer.with_rht else x.T
    bits = None
    if quantizer.stochastic_rounding:
        bits = em.random_bits(SEED, STEP, int(usage == "columnwise"), x.shape)
    return em.quantize(x, 16 if quantizer.with_2d_quantization else 1, bits)


def nibbles(packed: np.ndarray, any_zero: bool) -> np.ndarray:
    """Codes by column. any_zero: write minus zero as zero."""
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)
    return np.where(any_zero & (codes == 8), 0, codes)


def assert_same(
    fields: dict[str, torch.Tensor], usage: str, expected: em.Packed, what: str, any_zero: bool = False
) -> None:
    """The codes of a block whose scale is NaN mean nothing. any_zero: zeros have either sign, as sums of zeros do."""
    scales = fields[f"{usage}_scale_inv"]
    assert scales.dtype == torch.float8_e4m3fn
    scales = scales.view(torch.uint8).numpy()
    nan = np.isnan(E4M3.decode(expected.scales))
    assert np.array_equal(np.isnan(E4M3.decode(scales)), nan), what
    assert np.array_equal(scales[~nan], expected.scales[~nan]), what
    np.testing.assert_array_equal(fields[f"{usage}_amax"].numpy(), expected.amax, err_msg=what)
    packed = fields[f"{usage}_data"].numpy()
    assert (packed.shape, packed.dtype) == (expected.packed.shape, np.uint8), what
    meaningful = ~np.repeat(nan, 16, 1)[:, : 2 * packed.shape[1]]
    codes, wanted = nibbles(packed, any_zero), nibbles(expected.packed, any_zero)
    np.testing.assert_array_equal(codes[meaningful], wanted[meaningful], err_msg=what)


@pytest.mark.sentinels("stochastic-torch.float32", "16x16-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fields_equal_the_emulation(name: str, dtype: torch.dtype) -> None:
    quantizer = CASES[name]
    key = torch.tensor([SEED, STEP])
    usages = ("rowwise",) if quantizer.with_2d_quantization else ("rowwise", "columnwise")
    for what, x, values in matrices(dtype, SUMMABLE if quantizer.with_rht else NAMES):
        if quantizer.with_rht:
            x = torch.from_numpy(summable(values)).to(dtype)
            values = x.float().numpy()
        fields = quantizer.quantize_fields(x, key)
        assert sorted(fields) == sorted(f"{u}_{part}" for u in usages for part in ("data", "scale_inv", "amax"))
        for usage in usages:
            rotated = quantizer.with_rht and usage == "columnwise"
            assert_same(fields, usage, emulated(quantizer, usage, values), f"{what} {usage}", rotated)


@pytest.mark.sentinels("1x16-torch.float32", "RHT-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operands_equal_the_emulation(name: str, dtype: torch.dtype) -> None:
    """From the stored copies and from the path that makes no codes, in x's orientation: value * scale, and a factor."""
    quantizer = CASES[name]
    key = torch.tensor([SEED, STEP])
    for what, x, values in matrices(dtype, ["denormals", "ties E2M1", "outlier"]):
        if quantizer.with_rht:
            x = torch.from_numpy(summable(values)).to(dtype)
            values = x.float().numpy()
        fields = quantizer.quantize_fields(x, key)
        for usage in ("rowwise", "columnwise"):
            stored = "rowwise" if quantizer.symmetric else usage
            expected = emulated(quantizer, stored, values)
            decode = np.float32(1) / em.global_encode(expected.amax)
            exact = expected.values if stored == "rowwise" else expected.values.T
            direct = quantizer.rounded(x, usage, torch.bfloat16, key)
            kept = quantizer.operand_of_fields(fields, usage, torch.bfloat16, x.shape)
            for operand in (direct, kept):
                assert operand.values.dtype == torch.bfloat16 and operand.scale is not None
                assert operand.scale.item() == decode, what
                got = operand.values.double().numpy() * float(decode)
                np.testing.assert_array_equal(got, exact, err_msg=f"{what} {usage}", strict=True)
        rowwise = emulated(quantizer, "rowwise", values).values.astype(np.float32)
        got = quantizer.dequantize_fields(fields, torch.float32, x.shape).numpy()
        np.testing.assert_array_equal(got, rowwise, err_msg=what)


def test_dequantizing_a_transformed_copy_undoes_the_transform() -> None:
    """A column with one value in 16 is transformed to values of one magnitude, which NVFP4 holds exactly."""
    x = torch.zeros(37, 48)
    x[torch.arange(48) % 37, torch.arange(48)] = 0.75
    quantizer = NVFP4Quantizer(rowwise=False, with_rht=True)
    fields = quantizer.quantize_fields(x)
    torch.testing.assert_close(quantizer.dequantize_fields(fields, torch.float32, x.shape), x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """The known answers of Philox4x32-10 that its authors publish with Random123."""
    assert [int(word) for word in em.philox([np.array(c) for c in counter], key)] == expected
    words = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert [int(word) for word in words] == expected


@pytest.mark.parametrize("seed, step, stream", [(0, 0, 0), (-1, 2**63 - 1, 2**32 - 1), (2**40 + 3, 5, 1)])
def test_random_bits_are_philox_at_the_elements_index(seed: int, step: int, stream: int) -> None:
    for shape in ((7, 5), (3, 4, 17), (1,), (0, 3)):
        got = random_bits(torch.tensor([seed, step]), stream, shape).numpy().view(np.uint32)
        np.testing.assert_array_equal(got, em.random_bits(seed, step, stream, shape), strict=True)


def test_random_hadamard_is_the_matrix() -> None:
    """Within one rounding to bfloat16 and 16 in float32, along either dimension."""
    x = torch.randn(33, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    for dim, values in ((-1, x.float().numpy()), (-2, x.float().numpy().T)):
        padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 16))).astype(np.float64)
        exact = (padded.reshape(len(values), -1, 16) @ em.hadamard()).reshape(padded.shape)
        got = random_hadamard(x, dim)
        got = got.double().numpy() if dim == -1 else got.double().numpy().T
        magnitude = (np.abs(padded).reshape(len(values), -1, 16).sum(-1) / 4).repeat(16, 1)
        assert (np.abs(got - exact) <= 2.0**-8 * np.abs(exact) + 17 * 2.0**-24 * magnitude).all()
    assert np.array_equal(em.hadamard() @ em.hadamard().T, np.eye(16))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 128])
@pytest.mark.parametrize("columns", [1, 16, 31, 96])
def test_squares_packed_along_the_other_dimension_are_those_of_the_transpose(rows: int, columns: int) -> None:
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(0))
    packed, scales, _ = quantize_nvfp4(x, block_rows=16)
    expected = quantize_nvfp4(x.mT.contiguous(), block_rows=16)
    for found, want in zip(transpose_nvfp4(packed, scales, columns), expected, strict=False):
        assert found.dtype == want.dtype and found.is_contiguous()
        assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))
