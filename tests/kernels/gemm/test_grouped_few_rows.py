"""Each group's few rows by its matrix of a stored weight: what one matrix alone gives, whichever groups have rows."""

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

from te_models.kernels.backend import using_backend
from te_models.kernels.gemm import ScaledOperand, few_rows, gemm_counts, reset_gemm_counts
from te_models.kernels.gemm.few_rows import FEW
from te_models.kernels.grouped_gemm import explain_grouped_gemm, stored_grouped_gemm
from te_models.layers import GroupedLinear, MXFP8BlockScaling, quantized_model_init
from te_models.layers.tensor.grouped_tensor import GroupedTensor
from tests.kernels.gemm.test_few_rows import BF16, F32, FORMATS, rows

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
SPLITS = torch.tensor([3, 0, 1, FEW, 0, FEW + 1])
"""Groups of few rows, without rows, and of more than few."""
SCALED = ("per_tensor", "block_2d", "mxfp8", "nvfp4")


def stored(format: str) -> ScaledOperand:
    """Return a weight [6, 256, 336] of matrices of several magnitudes."""
    magnitudes = torch.tensor([1.0, 2.0, 1e-3, 50.0, 1.0, 7.0])[:, None, None]
    values = torch.randn(6, 256, 336, generator=torch.Generator().manual_seed(1)) * magnitudes
    weight = GroupedTensor.quantize(values, FORMATS[format])
    operand = weight.quantizer.operand_of_fields(weight.fields, "rowwise", BF16, weight.matrix_shape, quantized=True)
    assert operand is not None
    return operand


@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("format", SCALED)
def test_each_group_is_the_product_of_its_matrix_alone(format: str, dtype: torch.dtype) -> None:
    """Rows past the last group are zero."""
    operand = stored(format)
    total = int(SPLITS.sum())
    x = rows(total + 2, 336, dtype)
    reset_gemm_counts()
    y = stored_grouped_gemm(x, operand, SPLITS)
    assert gemm_counts() == {("stored_grouped_gemm", "few_rows"): 1} and not y[total:].any()
    for g, (begin, end) in enumerate(itertools.pairwise([0, *SPLITS.cumsum(0).tolist()])):
        alone = few_rows.stored_weight_linear(x[begin:end], operand.member(g))
        if end - begin > FEW:
            torch.testing.assert_close(y[begin:end], alone)
        else:
            assert torch.equal(y[begin:end], alone), g


@pytest.mark.parametrize("format", SCALED)
def test_without_a_library_the_matrices_are_dequantized(format: str) -> None:
    operand = stored(format)
    x = rows(int(SPLITS.sum()), 336, F32)
    y = stored_grouped_gemm(x, operand, SPLITS)
    reset_gemm_counts()
    with using_backend("definition"):
        torch.testing.assert_close(stored_grouped_gemm(x, operand, SPLITS), y, rtol=1e-5, atol=1e-2)
    assert gemm_counts() == {("stored_grouped_gemm", "emulation"): 1}


def test_a_scale_of_all_matrices() -> None:
    operand, x, splits = stored("per_tensor"), rows(6, 336, BF16), torch.ones(6, dtype=torch.int64)
    one = operand._replace(scale_inv=operand.scale_inv[:1])
    repeated = operand._replace(scale_inv=operand.scale_inv[:1].repeat(6))
    assert torch.equal(stored_grouped_gemm(x, one, splits), stored_grouped_gemm(x, repeated, splits))


def test_shapes_that_do_not_fit_are_refused() -> None:
    operand = stored("mxfp8")
    for x, splits in ((rows(3, 64, BF16), SPLITS), (rows(3, 336, BF16), torch.tensor([3]))):
        with pytest.raises(ValueError, match=r"6 stored matrices of 336 columns take rows \[T, 336\] and splits \[6\]"):
            stored_grouped_gemm(x, operand, splits)
    with pytest.raises(ValueError, match=r"m_splits add up to \d+ rows, but the input has only 3"):
        stored_grouped_gemm(rows(3, 336, BF16), operand, SPLITS)


def test_the_choice_is_explained() -> None:
    operand = stored("mxfp8")
    assert explain_grouped_gemm(rows(1, 336, BF16), operand) == "stored_grouped_gemm runs as few_rows"
    half = explain_grouped_gemm(rows(1, 336, torch.float16), operand, torch.float16)
    assert half.endswith("the rows are torch.float16; allowed: torch.bfloat16 or torch.float32")


def layer_and_rows(bias: bool = False) -> tuple[GroupedLinear, Tensor, Tensor]:
    torch.manual_seed(0)
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        layer = GroupedLinear(6, 352, 256, bias=bias, params_dtype=BF16)
    return layer, rows(4, 352, BF16), torch.tensor([1, 0, 2, 0, 0, 1])


@pytest.mark.parametrize("bias", (False, True))
def test_a_layer_takes_it_where_no_gradient_is_wanted(bias: bool) -> None:
    layer, x, splits = layer_and_rows(bias)
    reset_gemm_counts()
    trained = layer(x, splits)
    trained.sum().backward()
    assert layer.weight.grad is not None and ("stored_grouped_gemm", "few_rows") not in gemm_counts()
    reset_gemm_counts()
    with torch.no_grad():
        torch.testing.assert_close(layer(x, splits), trained.detach())
        assert gemm_counts() == {("stored_grouped_gemm", "few_rows"): 1}
        x, many = rows(FEW * 6 + 1, 352, BF16), torch.tensor([FEW * 6 + 1, 0, 0, 0, 0, 0])
        with torch.enable_grad():
            trained = layer(x, many)
        torch.testing.assert_close(layer(x, many), trained.detach())
    assert gemm_counts() == {("stored_grouped_gemm", "few_rows"): 2, ("grouped_gemm", "loop"): 1}


def test_a_compiled_layer_is_one_graph_for_any_rows_and_splits() -> None:
    layer, x, splits = layer_and_rows()
    backend = EagerAndRecordGraphs()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
        assert torch.equal(compiled(x, splits), layer(x, splits))
        for count in (5, 140):
            more, sizes = rows(count, 352, BF16), torch.tensor([2, count - 4, 0, 2, 0, 0])
            torch.testing.assert_close(compiled(more, sizes), layer(more, sizes))
    assert len(backend.graphs) == 1 and "stored_grouped_gemm" in backend.graphs[0].code
