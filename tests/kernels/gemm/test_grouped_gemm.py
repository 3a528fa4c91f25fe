"""Grouped GEMM, plain and quantized, on CPU: values, gradients, edges of the splits, backends, compiled."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from te_models.kernels import grouped_gemm as gg
from te_models.kernels.custom_op import flatten
from te_models.kernels.gemm import ScaledOperand
from te_models.kernels.gemm import backends as backends
from te_models.kernels.gemm.backends import DeviceCapability
from te_models.kernels.grouped_gemm.choice import choose_plain, choose_scaled
from te_models.kernels.grouped_gemm.scaled import per_row
from tests.compare import refused
from tests.kernels.gemm.scaled_cases import assert_within, exact, normal, quantized
from tests.kernels.triton.test_grouped_gemm import FORMATS, SPLITS, check_wgrad, exact_rows, quantized_rows, ranges

H100 = DeviceCapability("cuda", (9, 0), True, (13, 0))
NO_TRITON = H100._replace(triton=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("splits", "tail"), SPLITS, ids=str)
def test_values_and_gradients(splits: list[int], tail: int, transpose: bool, dtype: torch.dtype) -> None:
    rows, outer, inner = sum(splits) + tail, 12, 10
    a = normal(rows, inner if transpose else outer, seed=1, dtype=dtype).requires_grad_()
    b = normal(len(splits), outer, inner, seed=2, dtype=dtype).requires_grad_()
    y = gg.grouped_gemm(a, b, torch.tensor(splits), transpose)
    dy = normal(*y.shape, seed=3, dtype=dtype)
    da, db = torch.autograd.grad(y, (a, b), dy)
    for g, (begin, end) in enumerate(ranges(splits)):
        weight = b[g].double() if transpose else b[g].double().t()
        left, right = (dy, a) if transpose else (a, dy)
        assert_within(y[begin:end], a[begin:end].double(), weight)
        assert_within(da[begin:end], dy[begin:end].double(), weight.t())
        assert_within(db[g], left[begin:end].double().t(), right[begin:end].double().t())
    assert not y[sum(splits) :].any() and not da[sum(splits) :].any()


def test_second_derivatives() -> None:
    a, b = (normal(*shape, seed=4, dtype=torch.float64).requires_grad_() for shape in ((6, 3), (2, 4, 3)))
    dy = normal(6, 4, seed=5, dtype=torch.float64).requires_grad_()
    splits = torch.tensor([4, 1])
    assert torch.autograd.gradgradcheck(lambda a, b: gg.grouped_gemm(a, b, splits), (a, b))
    assert torch.autograd.gradcheck(lambda dy, a: gg.grouped_gemm_wgrad(dy, a, splits), (dy, a))


def test_splits_that_do_not_fit_are_errors() -> None:
    a, b = torch.ones(4, 3), torch.ones(2, 5, 3)
    refused(lambda: gg.grouped_gemm(a, b, torch.tensor([4, 2])), "m_splits add up to 6 rows, but the input has only 4")
    refused(lambda: gg.grouped_gemm(a, b, torch.tensor([4, -1])), "m_splits has a negative entry: -1")


def operands(formats: str, splits: list[int], tail: int, inner: int = 150) -> tuple[ScaledOperand, ScaledOperand]:
    left = quantized_rows(normal(sum(splits) + tail, inner, seed=1), splits, *FORMATS[formats][0], dim=1)
    return left, quantized(normal(len(splits), 21, inner, seed=2), *FORMATS[formats][1])


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("splits", "tail"), SPLITS, ids=str)
@pytest.mark.parametrize("formats", FORMATS)
def test_quantized_rows(formats: str, splits: list[int], tail: int, dtype: torch.dtype) -> None:
    left, right = operands(formats, splits, tail)
    count = torch.tensor(splits)
    # the emulation, and the backend that takes one scaled GEMM per group
    for y in (gg.scaled_grouped_gemm(left, right, count, dtype), gg.scaled._loop(left, right, count, dtype, True)):
        for g, (begin, end) in enumerate(ranges(splits)):
            assert_within(y[begin:end], exact_rows(left, begin, end, g, 1), exact(right)[g], roundings=2)
        assert not y[sum(splits) :].any()


@pytest.mark.parametrize("groups", [[1, 0, 2], [0, 0], [2]], ids=str)
@pytest.mark.parametrize("formats", FORMATS)
def test_quantized_weight_gradients(formats: str, groups: list[int]) -> None:
    (kind, block), _ = FORMATS[formats]
    splits = [gg.ROW_ALIGNMENT[kind] * size for size in groups]
    rows, count = sum(splits) + gg.ROW_ALIGNMENT[kind], torch.tensor(splits)
    left = quantized_rows(normal(rows, 18, seed=3), splits, kind, block, dim=0)
    right = quantized_rows(normal(rows, 33, seed=4), splits, kind, block, dim=0)
    written = gg.scaled_grouped_gemm_wgrad(left, right, count, torch.float32)
    before = normal(len(splits), 18, 33, seed=5)
    added = before.clone()
    gg.scaled_grouped_gemm_wgrad_accumulate_(added, left, right, count)
    for g, (begin, end) in enumerate(ranges(splits)):
        a, b = (exact_rows(side, begin, end, g, 0) for side in (left, right))
        check_wgrad(written[g], before[g], a, b, accumulate=False)
        check_wgrad(added[g], before[g], a, b, accumulate=True)


def test_nvfp4_rows() -> None:
    """One amax per group of rows and per member of the weight."""
    splits = [3, 0, 5]
    parts = [quantized(normal(max(size, 1), 64, seed=g), "nvfp4", None) for g, size in enumerate(splits)]
    data = torch.cat([p.data[:size] for p, size in zip(parts, splits, strict=True)])
    scales = torch.cat([p.scale_inv[:size].view(torch.uint8) for p, size in zip(parts, splits, strict=True)])
    amax = torch.stack([p.amax for p in parts if p.amax is not None])
    left = ScaledOperand(data, scales.view(torch.float8_e4m3fn), "nvfp4", (1, 16), amax)
    right = quantized(normal(3, 10, 64, seed=9), "nvfp4", None)
    y = gg.scaled_grouped_gemm(left, right, torch.tensor(splits), torch.bfloat16)
    for g, (begin, end) in enumerate(ranges(splits)):
        assert_within(y[begin:end], exact(parts[g])[: splits[g]], exact(right.member(g)), roundings=2)


@pytest.mark.parametrize(
    ("formats", "hw", "backend"),
    [
        ("pow2", H100, "triton"),
        ("mxfp8", H100, "triton"),
        ("per_tensor", H100, "triton"),
        ("pow2", NO_TRITON, "emulation"),  # blocks of E5M2 by E4M3: no backend but Triton
        ("pow2", DeviceCapability("cpu"), "emulation"),
    ],
)
def test_backends_of_quantized_rows(formats: str, hw: DeviceCapability, backend: str) -> None:
    left, right = operands(formats, [16, 16], 0, inner=128)
    choice = choose_scaled("scaled_grouped_gemm", left, right, torch.bfloat16, hw)
    assert choice.backend == backend and choice.fallback == (backend == "emulation" and hw.type == "cuda")


def test_backends_without_triton() -> None:
    rows, weight = normal(32, 128, seed=1), normal(2, 32, 128, seed=2)
    blocks = quantized(rows, "pow2", (1, 128)), quantized(weight, "pow2", (128, 128))
    assert choose_scaled("scaled_grouped_gemm", *blocks, torch.bfloat16, NO_TRITON).backend == "loop"
    whole = quantized(rows, "per_tensor", None), quantized(weight, "per_tensor", None)
    whole = whole[0]._replace(scale_inv=whole[0].scale_inv.expand(2)), whole[1]
    assert choose_scaled("scaled_grouped_gemm", *whole, torch.bfloat16, NO_TRITON).backend == "native"
    assert choose_scaled("scaled_grouped_gemm", *whole, torch.float32, NO_TRITON).backend == "loop"
    for tensors, hw, backend in (
        ((rows, weight), H100, "triton"),
        ((rows, weight), NO_TRITON, "native"),
        ((rows.float(), weight.float()), NO_TRITON, "loop"),
        ((rows, weight), DeviceCapability("cpu"), "loop"),
    ):
        assert choose_plain("grouped_gemm", *tensors, hw).backend == backend


def test_explanations_and_counts() -> None:
    backends.reset_gemm_counts()
    left, right = operands("pow2", [4, 4], 0)
    splits = torch.tensor([4, 4])
    gg.scaled_grouped_gemm(left, right, splits, torch.bfloat16)
    assert backends.gemm_counts() == {("scaled_grouped_gemm", "emulation"): 1, ("grouped_gemm", "loop"): 1}
    text = gg.explain_grouped_gemm(torch.ones(2, 2), torch.ones(1, 2, 2))
    assert text.startswith("grouped_gemm runs as loop; not triton")
    text = gg.explain_grouped_gemm(left, right)
    assert text.startswith("scaled_grouped_gemm runs as emulation; not triton: it needs a CUDA device, this is cpu")
    text = gg.explain_grouped_gemm(left, left, torch.float32)
    assert text.startswith("scaled_grouped_gemm_wgrad runs as emulation; not triton")
    assert gg.explain_grouped_gemm(torch.ones(2, 2), torch.ones(2, 2)).startswith("grouped_gemm_wgrad runs as loop")
    refused(lambda: gg.explain_grouped_gemm(left, torch.ones(2, 2, 2)), "one side is quantized and the other is not")
    with pytest.raises(ValueError, match="strict asks for a GEMM on the quantized numbers"):
        gg.scaled_grouped_gemm(left, right, splits, torch.bfloat16, strict=True)


def test_operands_that_do_not_fit_are_errors() -> None:
    left, right = operands("pow2", [4, 4], 0)
    splits = torch.tensor([4, 4])
    with pytest.raises(ValueError, match=r"takes rows \[T, K\] and weights \[G, N, K\]"):
        gg.scaled_grouped_gemm(left, right.member(0), splits, torch.bfloat16)
    square = quantized(normal(8, 150, seed=1), "pow2", (128, 128))
    with pytest.raises(ValueError, match="a block of several rows could span two groups"):
        gg.scaled_grouped_gemm(square, right, splits, torch.bfloat16)
    whole = quantized(normal(8, 150, seed=1), "per_tensor", None)
    with pytest.raises(ValueError, match=r"left\.scale_inv is \(\), but there is one per matrix: \(2,\)"):
        gg.scaled_grouped_gemm(whole, right, splits, torch.bfloat16)
    with pytest.raises(ValueError, match="m_splits has 4, but groups of scaled rows are padded to a multiple of 128"):
        gg.scaled_grouped_gemm_wgrad(left, left, splits, torch.bfloat16)
    with pytest.raises(ValueError, match=r"main_grad is \(2, 8, 7\), but the weight gradient is \(2, 8, 8\)"):
        gg.scaled_grouped_gemm_wgrad_accumulate_(torch.zeros(2, 8, 7), left, left, splits)


def test_rows_find_their_group_without_reading_the_splits() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    assert per_row(values, torch.tensor([2, 0, 1]), 5).tolist() == [1.0, 1.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("formats", FORMATS)
def test_the_operations_are_the_functions(formats: str) -> None:
    left, right = operands(formats, [4, 4], 1)
    splits = torch.tensor([4, 4])
    arguments = (*flatten(left), *flatten(right), splits, torch.bfloat16, True, False)
    assert torch.equal(gg.scaled._rows(*arguments), gg.scaled_grouped_gemm(left, right, splits, torch.bfloat16))
    (kind, block), _ = FORMATS[formats]
    size = gg.ROW_ALIGNMENT[kind]
    side = quantized_rows(normal(2 * size, 6, seed=1), [size, size], kind, block, dim=0)
    splits = torch.tensor([size, size])
    arguments = (torch.zeros(2, 6, 6), *flatten(side), *flatten(side), splits, True, False)
    gg.scaled._wgrad_accumulate_(*arguments)
    expected = torch.zeros(2, 6, 6)
    gg.scaled_grouped_gemm_wgrad_accumulate_(expected, side, side, splits)
    assert torch.equal(arguments[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_for_any_splits(backend: str) -> None:
    """One graph for every number of tokens and every split, empty groups among them.

    Operands come quantized: the quantizer has graphs of its own, one more where all rows fit one block, for torch
    specializes a size of 1."""

    def run(
        left: ScaledOperand, columns: ScaledOperand, right: ScaledOperand, splits: Tensor, main_grad: Tensor
    ) -> Tensor:
        gg.scaled_grouped_gemm_wgrad_accumulate_(main_grad, columns, columns, splits)
        return gg.scaled_grouped_gemm(left, right, splits, torch.bfloat16)

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    right = quantized(normal(2, 9, 128, seed=1), "pow2", (128, 128))
    for sizes in ([128, 256], [0, 256], [512, 0]):
        x, splits = normal(sum(sizes), 128, seed=2), torch.tensor(sizes)
        left, columns = quantized(x, "pow2", (1, 128)), quantized(x.mT, "pow2", (1, 128))
        eager, main_grad = torch.zeros(2, 128, 128), torch.zeros(2, 128, 128)
        expected = run(left, columns, right, splits, eager)
        torch.testing.assert_close(compiled(left, columns, right, splits, main_grad), expected, rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(main_grad, eager, rtol=2**-7, atol=1e-3)
    assert counter.frame_count == 1
