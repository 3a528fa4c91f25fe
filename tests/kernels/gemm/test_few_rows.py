"""A few rows by a stored weight: the sum of exactly what the weight dequantizes to, in every format and shape."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

from te_models.kernels.gemm import ScaledOperand, explain_gemm, few_rows, gemm_counts, reset_gemm_counts
from te_models.kernels.gemm.few_rows import library
from te_models.kernels.gemm.few_rows.op import FEW, dequantized_weight
from te_models.kernels.quantize.cpu import rounding as shared
from te_models.layers import Linear, MXFP8BlockScaling, quantized_model_init
from te_models.layers.gemm.product import stored_for_few_rows
from te_models.layers.quantizer import Quantizer
from te_models.layers.quantizer.blockwise import Float8BlockQuantizer, MXFP8Quantizer
from te_models.layers.quantizer.fp8 import Float8CurrentScalingQuantizer
from te_models.layers.quantizer.nvfp4 import NVFP4Quantizer
from tests.kernels.fewer_instructions import compiled_quickly
from tests.patches import without_compiler

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
BF16, F32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: dict[str, Quantizer] = {
    "per_tensor": Float8CurrentScalingQuantizer(),
    "per_tensor_e5m2": Float8CurrentScalingQuantizer(fp8_dtype=E5M2),
    "block": Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d": Float8BlockQuantizer(block_scaling_dim=2),
    "block_float32": Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8_e5m2": MXFP8Quantizer(fp8_dtype=E5M2),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4_2d": NVFP4Quantizer(with_2d_quantization=True),
}


INSTRUCTIONS = ("widest", "avx2") if torch.cpu._is_avx512_supported() else ("widest",)
STORED = ("widest", "decoded", "avx2") if torch.cpu._is_avx512_bf16_supported() else INSTRUCTIONS


@pytest.fixture(params=STORED)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of this CPU's widest vectors, the same without tables of bytes, and that of AVX2's."""
    if request.param != "widest":
        function, without = library._function, {"decoded": "LOOKUP", "avx2": "WIDE"}[request.param]
        monkeypatch.setattr(library, "_function", lambda *which: compiled_quickly(function, *which, without))


SHAPES = ((256, 512), (515, 336), (301, 1120))  # of weights: the last two end within a block and within four rows


def stored(format: str, shape: tuple[int, int] = (256, 512), magnitude: float = 1.0) -> tuple[ScaledOperand, Tensor]:
    """Return a weight and a function of its values in a dtype, as the layers dequantize it."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * magnitude
    weight = FORMATS[format].quantize(values)
    operand = weight.quantizer.operand_of_fields(weight.fields, "rowwise", BF16, weight.matrix_shape, quantized=True)
    assert operand is not None
    return operand, weight


def rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_within_bound(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Each of K products and sums is rounded once at most, in float32, and the result once more, in y's dtype."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    magnitudes = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    of_sum = (x.shape[1] + 2) * 2.0**-24 * magnitudes
    bound = of_sum + torch.finfo(y.dtype).eps / 2 * (exact.abs() + of_sum)
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


@pytest.mark.sentinels("widest-mxfp8-dtype1", "widest-nvfp4-dtype0")
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_the_product_with_the_dequantized_weight(instructions: None, format: str, dtype: torch.dtype) -> None:
    reset_gemm_counts()
    for shape in SHAPES:
        operand, weight = stored(format, shape)
        values = weight.dequantize(dtype)
        bias = rows(1, shape[0], dtype)[0]
        for count in (1, 2, 3, 4, 5, 16):
            x = rows(count, shape[1], dtype)
            assert_within_bound(few_rows.stored_weight_linear(x, operand), x, values)
            assert_within_bound(few_rows.stored_weight_linear(x, operand, bias), x, values, bias)
    assert gemm_counts() == {("stored_linear", "few_rows"): 36}


@pytest.mark.sentinels(
    "widest-1.0-nvfp4-dtype0",
    "widest-1e-38-block-dtype0",
    "widest-1e+35-block_2d-dtype0",
    "widest-1.0-per_tensor-dtype0",
    "widest-1e-33-per_tensor-dtype0",
)
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("magnitude", (1.0, 1e-33, 1e-38, 1e35))
def test_each_weight_is_exactly_its_dequantized_value(
    instructions: None, format: str, dtype: torch.dtype, magnitude: float
) -> None:
    """Rows of the identity read the weight column by column."""
    operand, weight = stored(format, (301, 336), magnitude)
    values = weight.dequantize(dtype)
    identity = torch.eye(336, dtype=dtype)
    for count in (1, 16):
        for begin in range(0, 336, 16 if count == 16 else 47):
            found = few_rows.stored_weight_linear(identity[begin : begin + count], operand)
            assert torch.equal(found, values[:, begin : begin + count].t()), (begin, count)


TO_A_TIE = float.fromhex("0x1.5733340000000p-12")  # 10 times it is above the middle of two bfloat16, as float32 on it


@pytest.mark.sentinels("widest-0.7-fp8_dtype0", "widest-3e-39-fp8_dtype0", f"widest-{TO_A_TIE}-fp8_dtype0")
@pytest.mark.parametrize("fp8_dtype", (E4M3, E5M2))
@pytest.mark.parametrize("scale", (0.7, 300.0, 3e-4, TO_A_TIE, 2.0**-20, 3e-39, 2.0**121))
def test_every_byte_is_decoded(instructions: None, fp8_dtype: torch.dtype, scale: float) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(fp8_dtype)
    operand = ScaledOperand(data, torch.tensor(scale), "per_tensor")
    for dtype in (BF16, F32):
        wanted = dequantized_weight(operand, dtype)[0]
        finite = wanted.isfinite()
        assert few_rows.stored_weight_linear(rows(1, 256, dtype), operand).isnan().all()  # every row has a NaN
        zeroed = torch.where(finite, data.view(torch.uint8), 0).view(fp8_dtype)
        cleared = operand._replace(data=zeroed)
        for k in range(0, 256, 5):
            x = torch.zeros(1, 256, dtype=dtype)
            x[0, k] = 1
            assert (few_rows.stored_weight_linear(x, cleared) == torch.where(finite, wanted, 0)[k]).all()


def test_subnormal_bytes_are_read_where_subnormal_numbers_are_taken_for_zero(instructions: None) -> None:
    data = torch.arange(8, dtype=torch.uint8).repeat(256, 32).view(E4M3)
    operand = ScaledOperand(data, torch.tensor(1.0), "per_tensor")
    identity = torch.eye(256, dtype=BF16)[:8]
    wanted = dequantized_weight(operand, BF16)[0, :8].tolist()
    subnormal = torch.tensor([1e-39])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        found = [few_rows.stored_weight_linear(row[None], operand)[0, 0].item() for row in identity]
        assert (subnormal * 1).item() == 0  # the mode is as it was
    finally:
        torch.set_flush_denormal(False)
    assert found == wanted and 0 not in found[1:]


@pytest.mark.sentinels("widest-dtype0", "widest-dtype1", f"{STORED[1 % len(STORED)]}-dtype0", f"{STORED[-1]}-dtype0")
@pytest.mark.parametrize("dtype", (BF16, F32))
def test_every_scale_is_decoded(instructions: None, dtype: torch.dtype) -> None:
    """A row for each scale byte of MXFP8 and of NVFP4."""
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    mxfp8 = ScaledOperand(torch.full((256, 256), 0.75).to(E4M3), byte.repeat(1, 8), "e8m0", (1, 32))
    codes = torch.full((256, 128), 0x35, dtype=torch.uint8)
    for amax in (3.0, 0.0, 1e-37):
        nvfp4 = ScaledOperand(codes, byte.repeat(1, 16).view(E4M3), "nvfp4", (1, 16), torch.tensor(amax))
        for operand in (mxfp8, nvfp4):
            x = torch.zeros(1, 256, dtype=dtype)
            x[0, 7] = 1
            found, wanted = few_rows.stored_weight_linear(x, operand)[0], dequantized_weight(operand, dtype)[:, 7]
            assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.sentinels(
    *(f"widest-{format}" for format in FORMATS), f"{STORED[1 % len(STORED)]}-mxfp8", f"{STORED[-1]}-mxfp8"
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_the_others(instructions: None, format: str) -> None:
    operand, _ = stored(format, (515, 336))
    x = rows(16, 336, BF16)
    together = few_rows.stored_weight_linear(x, operand)
    assert torch.equal(together, torch.cat([few_rows.stored_weight_linear(row[None], operand) for row in x]))


def test_the_choice_is_explained() -> None:
    operand, _ = stored("mxfp8")
    assert explain_gemm(rows(1, 512, BF16), operand, BF16) == "stored_linear runs as few_rows"
    many = explain_gemm(rows(FEW + 1, 512, F32), operand, F32)
    assert many == "stored_linear runs as emulation; not few_rows: it is for at most 16 rows, these are 17"
    half = explain_gemm(rows(1, 512, torch.float16), operand, torch.float16)
    assert "the rows are torch.float16; allowed: torch.bfloat16 or torch.float32" in half
    small, _ = stored("mxfp8", (64, 512))
    assert "at least 65536 elements, this has 32768" in explain_gemm(rows(1, 512, BF16), small, BF16)
    assert "contiguous" in explain_gemm(rows(1, 256, BF16), operand.mT, BF16)
    with pytest.raises(ValueError, match=r"left is torch.bfloat16 \(1, 64\); rows for torch.bfloat16 are of that and"):
        explain_gemm(rows(1, 64, BF16), operand, BF16)


def layer_and_rows() -> tuple[Linear, Tensor]:
    torch.manual_seed(0)
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        return Linear(512, 256, params_dtype=BF16), rows(2, 512, BF16)


def test_a_layer_takes_it_where_no_gradient_is_wanted() -> None:
    layer, x = layer_and_rows()
    reset_gemm_counts()
    layer(x).sum().backward()
    assert layer.weight.grad is not None and gemm_counts() == {}
    with torch.no_grad():
        y = layer(x[:, None])
        assert y.shape == (2, 1, 256) and gemm_counts() == {("stored_linear", "few_rows"): 1}
        assert_within_bound(y[:, 0], x, layer.weight.dequantize(), layer.bias)
        layer(rows(FEW + 1, 512, BF16))
        layer(x.half())
        assert stored_for_few_rows(x.half(), layer.weight) is None
    assert gemm_counts() == {("stored_linear", "few_rows"): 1}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.trace is deprecated, and still used
def test_a_trace_has_what_is_computed() -> None:
    layer, x = layer_and_rows()
    with torch.no_grad():
        operand = stored_for_few_rows(x, layer.weight)
        assert operand is not None
        traced = torch.jit.trace(lambda rows: few_rows.stored_weight_linear(rows, operand), x)
        more = rows(2, 512, BF16) + 1
        assert torch.equal(traced(more), few_rows.stored_weight_linear(more, operand))


def test_a_compiled_layer_is_one_graph_for_any_rows() -> None:
    layer, x = layer_and_rows()
    backend = EagerAndRecordGraphs()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
        assert torch.equal(compiled(x), layer(x))
        for count in (5, 16, 40):
            more = rows(count, 512, BF16)
            assert torch.equal(compiled(more), layer(more))
    assert len(backend.graphs) == 1 and "stored_linear" in backend.graphs[0].code


def test_inductor_runs_it() -> None:
    layer, x = layer_and_rows()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_without_a_compiler_the_weight_is_dequantized(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    monkeypatch.setattr(library, "_function", without_compiler)
    reset_gemm_counts()
    layer, x = layer_and_rows()
    with torch.no_grad():
        y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight.dequantize(), layer.bias))
    assert shared.fallbacks == {"there is no C++ compiler": 1}
    assert gemm_counts() == {("stored_linear", "emulation"): 1}
