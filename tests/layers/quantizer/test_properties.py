"""Of any tensor: nearest numbers, idempotence, transposing and batching commute, groups do not see each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

import te_models.layers.quantizer as quantizers
from te_models.layers.quantizer.group_offsets import GroupOffsets
from tests.compare import raw
from tests.layers import emulation as em
from tests.layers.emulation_nvfp4 import E2M1
from tests.layers.quantizer.examples import EXAMPLES

FORMATS = {torch.float8_e4m3fn: em.E4M3, torch.float8_e5m2: em.E5M2}
POW2: dict[str, quantizers.Quantizer] = {
    "tensor": quantizers.Float8CurrentScalingQuantizer(force_pow_2_scales=True),
    "1x128": quantizers.Float8BlockQuantizer(block_scaling_dim=1),
    "128x128": quantizers.Float8BlockQuantizer(),
    "1x32": quantizers.MXFP8Quantizer(),
    "32x32 E5M2": quantizers.MXFP8Quantizer(two_dimensional=True, fp8_dtype=torch.float8_e5m2),
}


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Float32 matrices whose elements are drawn freely or spread over some binary places, finite when rounded up."""
    shape = draw(st.tuples(st.integers(1, 40), st.integers(1, 140)))
    if draw(st.booleans()):
        elements = st.floats(-(2.0**127), 2.0**127, width=32)
        return torch.from_numpy(draw(arrays(np.float32, shape, elements=elements, fill=st.just(np.float32(0)))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, middle = draw(st.integers(0, 20)), draw(st.integers(-100, 100))
    values = rng.standard_normal(shape) * 2.0 ** (middle + rng.integers(-spread, spread + 1, shape))
    return torch.from_numpy(values.astype(np.float32))


def dequantized(quantizer: quantizers.Quantizer, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return quantizer.dequantize_fields(quantizer.quantize_fields(x), dtype, x.shape)


def step_sizes(quantizer: quantizers.Quantizer, x: Tensor) -> tuple[em.Format, np.ndarray]:
    """The format and what each element's code is multiplied with, float64, as the stored scales say."""
    fields = quantizer.quantize_fields(x)
    if isinstance(quantizer, quantizers.NVFP4Quantizer):
        amax = fields["rowwise_amax"].item()
        decode = (
            float(np.float32(1) / np.float32(min(6 * quantizer.nvfp4_e4m3_max / amax, em.F32_MAX))) if amax else 1.0
        )
        scales = em.E4M3.decode(fields["rowwise_scale_inv"].view(torch.uint8).numpy())
        return E2M1, em.per_element(scales, (1, 16), x.shape) * decode
    scale = fields["rowwise_scale_inv"].numpy()
    scale = 2.0 ** (scale.astype(np.int64) - 127) if scale.dtype == np.uint8 else scale.astype(np.float64)
    block = quantizer.block or (x.shape[0], x.shape[1])
    return FORMATS[quantizer.fp8_dtype], em.per_element(np.atleast_2d(scale), block, x.shape)


QUANTIZING = {name: q for name, q in EXAMPLES.items() if q.FORMAT not in ("identity", "hybrid")}


@pytest.mark.sentinels("tensor", "1x32", "16x16", "128x128 float32")
@pytest.mark.parametrize("name", QUANTIZING)
@settings(max_examples=30, deadline=None)
@given(x=matrices())
def test_every_value_goes_to_the_nearest_number_of_its_block(name: str, x: Tensor) -> None:
    """The error is at most half the gap around the value; what is above the largest number goes there. Scales and
    products in float32 add a few units in the last place. Where the factor to multiply with would be beyond float32 it
    is float32's maximum, by definition (only blocks below 2^-125 have one), and nothing but the sign is sure."""
    fmt, step = step_sizes(QUANTIZING[name], x)
    exact, got = x.double().numpy(), dequantized(QUANTIZING[name], x).double().numpy()
    excess = np.abs(exact) - fmt.max * step
    magnitude = np.minimum(np.abs(exact), fmt.max * step) / np.where(step > 0, step, 1)
    above = np.clip(np.searchsorted(fmt.values, magnitude), 1, len(fmt.values) - 1)
    error = np.where(excess > 0, excess, np.diff(fmt.values)[above - 1] * step / 2)
    error = np.where((step > 0) & (step * float(em.F32_MAX) < 1), np.abs(exact), error)
    assert (np.abs(got - exact) <= error * (1 + 1e-5) + np.abs(exact) * 1e-6 + 2.0**-149).all()


@pytest.mark.parametrize("name", POW2)
@settings(max_examples=30, deadline=None)
@given(x=matrices())
def test_with_scales_that_are_powers_of_two_quantizing_again_changes_nothing(name: str, x: Tensor) -> None:
    once = dequantized(POW2[name], x)
    assert torch.equal(dequantized(POW2[name], once), once)


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=10, deadline=None)
@given(x=matrices())
def test_transposition(name: str, x: Tensor) -> None:
    """A symmetric format commutes with it; otherwise the columnwise copy is the rowwise one of the transpose."""
    quantizer = EXAMPLES[name]
    if quantizer.symmetric and quantizer.FORMAT not in ("int4", "int8"):  # whose groups lie along rows
        assert torch.equal(dequantized(quantizer, x.mT), dequantized(quantizer, x).mT)
    elif not quantizer.symmetric and quantizer.FORMAT != "hybrid" and "RHT" not in name:
        columnwise = quantizer.rounded(x, "columnwise", torch.float32)
        rowwise = quantizer.rounded(x.mT.contiguous(), "rowwise", torch.float32)
        assert torch.equal(columnwise.values.mT, rowwise.values) and columnwise.scale == rowwise.scale


def pieces(quantizer: quantizers.Quantizer, x: Tensor) -> dict[str, Tensor]:
    """All that a quantizer makes of x."""
    found = dict(quantizer.quantize_fields(x))
    for usage in ("rowwise", "columnwise"):
        operand = quantizer.rounded(x, usage, torch.bfloat16)
        found[f"{usage} values"] = operand.values
        if operand.scale is not None:
            found[f"{usage} scale"] = operand.scale
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_members_of_a_batch_are_quantized_by_themselves(name: str) -> None:
    x = torch.randn(2, 3, 33, 50, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-3, 3, 6).view(2, 3, 1, 1)
    together = pieces(EXAMPLES[name], x)
    for i, j in np.ndindex(2, 3):
        for part, value in pieces(EXAMPLES[name], x[i, j]).items():
            assert together[part].shape == (2, 3, *value.shape)
            assert torch.equal(raw(together[part][i, j]), raw(value)), part


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_groups_of_rows_are_quantized_by_themselves(name: str, usage) -> None:
    quantizer = EXAMPLES[name]
    align = max(quantizer.row_block("rowwise"), quantizer.row_block("columnwise"))
    sizes = [2 * align, 0, align, 3 * align]
    x = torch.randn(sum(sizes), 50, generator=torch.Generator().manual_seed(0))
    x[: sizes[0]] *= 1000
    together = quantizer.rounded(x, usage, torch.float32, None, GroupOffsets.of(torch.tensor(sizes), len(x)))
    begin = 0
    for group, size in enumerate(sizes):
        alone = quantizer.rounded(x[begin : begin + size], usage, torch.float32)
        assert torch.equal(together.values[begin : begin + size], alone.values)
        assert (together.scale is None) == (alone.scale is None)
        if size and alone.scale is not None and together.scale is not None:
            assert together.scale[group] == alone.scale
        begin += size


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("shape", [(0, 48), (33, 0), (0, 0)], ids=str)
def test_a_matrix_without_elements(name: str, shape: tuple[int, int]) -> None:
    quantizer, x = EXAMPLES[name], torch.empty(shape)
    fields = quantizer.quantize_fields(x)
    assert tuple(fields) == quantizer.field_names()
    assert quantizer.dequantize_fields(fields, torch.bfloat16, shape).shape == shape
    for usage in ("rowwise", "columnwise"):
        rows = -(-shape[0] // 16) * 16 if "RHT" in name and usage == "columnwise" else shape[0]
        for operand in (
            quantizer.rounded(x, usage, torch.float32),
            quantizer.operand_of_fields(fields, usage, torch.float32, shape),
        ):
            assert operand.values.shape == (rows, shape[1])
