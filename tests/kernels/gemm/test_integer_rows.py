"""A few rows by a weight stored as integers: the sum of exactly what the weight dequantizes to, in every form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels.backend import using_backend
from te_models.kernels.gemm import few_rows, gemm_counts, reset_gemm_counts
from te_models.kernels.gemm.few_rows import IntegerOperand, library
from te_models.layers import GroupedLinear, Linear
from te_models.layers.quantizer import Int4Quantizer, Int8Quantizer
from te_models.layers.quantizer.integer import IntQuantizer
from tests.kernels.fewer_instructions import compiled_quickly
from tests.kernels.gemm.test_few_rows import BF16, F32, INSTRUCTIONS, assert_within_bound, rows

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
FORMS: dict[str, IntQuantizer] = {
    "int4": Int4Quantizer(),
    "int4 with zeros": Int4Quantizer(zero_points=True, group_size=64, scale_dtype=torch.float16),
    "int4 by row": Int4Quantizer(group_size=0, scale_dtype=F32),
    "int8": Int8Quantizer(),
    "int8 with zeros": Int8Quantizer(zero_points=True, group_size=128, scale_dtype=F32),
    "int8 by row": Int8Quantizer(group_size=0, scale_dtype=torch.float16),
}
SHAPES = ((256, 512), (515, 336), (301, 1117))  # the last two end within a group and within four rows; odd columns


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of this CPU's widest vectors, and that of AVX2's."""
    if request.param != "widest":
        function = library._function
        monkeypatch.setattr(
            library,
            "_function",
            lambda format, dtype, name="te_few_rows": compiled_quickly(function, format, dtype, "WIDE", name),
        )


def stored(form: str, shape: tuple[int, ...], scale: float | None = None) -> tuple[IntegerOperand, Any]:
    """Return a weight as an operand and as the layers have it. scale: some of its scales are this one."""
    weight: Any = FORMS[form].quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    if scale is not None:
        weight.fields["rowwise_scale_inv"][..., ::3, :] = scale
    return weight.quantizer.integer_operand(weight.fields, weight.matrix_shape), weight


@pytest.mark.sentinels("widest-int4-dtype0", f"{INSTRUCTIONS[-1]}-int4 with zeros-dtype0", "widest-int8-dtype1")
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_product_with_the_dequantized_weight(instructions: None, form: str, dtype: torch.dtype) -> None:
    """And a row's result does not depend on the other rows."""
    for shape in SHAPES:
        operand, weight = stored(form, shape)
        values, bias = weight.dequantize(dtype), rows(1, shape[0], dtype)[0]
        x = rows(16, shape[1], dtype)
        reset_gemm_counts()
        whole = few_rows.stored_weight_linear(x, operand, bias)
        assert_within_bound(whole, x, values, bias)
        for count in (1, 2, 3, 5):
            assert torch.equal(few_rows.stored_weight_linear(x[:count], operand, bias), whole[:count])
        assert gemm_counts() == {("stored_linear", "few_rows"): 5}


@pytest.mark.sentinels(
    "widest-None-int4-dtype0", f"{INSTRUCTIONS[-1]}-None-int4-dtype0", "widest-inf-int4 with zeros-dtype0"
)
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", (None, -0.37, 0.0, 3e-39, 1e35, torch.inf, torch.nan))
def test_each_weight_is_exactly_its_dequantized_value(
    instructions: None, form: str, dtype: torch.dtype, scale: float | None
) -> None:
    """Rows of the identity read the weight column by column, and finite weights are no NaN beside others."""
    for shape in ((301, 336), (301, 333)):
        operand, weight = stored(form, shape, scale)
        values = weight.dequantize(dtype)
        identity = torch.eye(shape[1], dtype=dtype)
        finite = values.isfinite().all(1)
        for begin in range(0, shape[1], 16):
            found = few_rows.stored_weight_linear(identity[begin : begin + 16], operand).t()
            assert torch.equal(found[finite], values[finite, begin : begin + 16]), begin
            assert not found[~finite].isfinite().all(1).any()


@pytest.mark.sentinels(
    *(f"widest-{bits}-dtype{i}" for bits in (4, 8) for i in (0, 1)),
    *(f"{INSTRUCTIONS[-1]}-{bits}-dtype0" for bits in (4, 8)),
)
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("bits", (4, 8))
def test_every_code_has_its_value(instructions: None, bits: int, dtype: torch.dtype) -> None:
    """All codes by all zero points."""
    codes = 2**bits
    data = torch.arange(codes, dtype=torch.uint8).repeat(256, 256 // codes)
    zero = (torch.arange(256) % codes).to(torch.uint8)[:, None]
    packed = data[:, ::2] | (data[:, 1::2] << 4) if bits == 4 else data
    operand = IntegerOperand(packed, torch.full((256, 1), 0.7), zero, 256, bits, 256)
    expected = ((data.float() - zero.float()) * 0.7).to(dtype)
    parts = torch.eye(256, dtype=dtype).split(16)
    found = torch.cat([few_rows.stored_weight_linear(part, operand) for part in parts])
    assert torch.equal(found.t(), expected)


def test_layers_multiply_by_the_stored_weight() -> None:
    """A dense layer, and one of experts, as the definition does up to the order of sums."""
    dense = Linear(512, 256, params_dtype=BF16)
    dense.weight = torch.nn.Parameter(FORMS["int4"].quantize(dense.weight.detach()), requires_grad=False)
    experts: Any = GroupedLinear(3, 512, 256, bias=False, params_dtype=BF16)
    experts.weight = torch.nn.Parameter(FORMS["int4 with zeros"].quantize(experts.weight.detach()), requires_grad=False)
    x, splits = rows(5, 512, BF16), torch.tensor([2, 0, 3])
    with torch.no_grad():
        reset_gemm_counts()
        found = dense(x), experts(x, splits)
        counts = {("stored_linear", "few_rows"): 1, ("stored_grouped_gemm", "few_rows"): 1}
        assert gemm_counts() == counts
        with using_backend("definition"):
            expected = dense(x), experts(x, splits)
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-10)
    values: Tensor = experts.weight.dequantize(BF16)
    assert_within_bound(found[1][:2], x[:2], values[0])
    assert_within_bound(found[1][2:], x[2:], values[2])


def test_groups_that_no_vector_holds_are_dequantized() -> None:
    weight: Any = Int4Quantizer(group_size=16).quantize(torch.randn(256, 512))
    operand = weight.quantizer.integer_operand(weight.fields, weight.matrix_shape)
    x = rows(2, 512, BF16)
    reset_gemm_counts()
    assert_within_bound(few_rows.stored_weight_linear(x, operand), x, weight.dequantize(BF16))
    assert gemm_counts() == {("stored_linear", "emulation"): 1}
    assert "groups of whole 32 columns, not of 16" in str(few_rows.choose_stored(x, operand))
