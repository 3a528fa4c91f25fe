"""Weight gradients added into a persistent gradient: values, empty groups, NaN-poisoned memory, compiled backward."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.gemm import gemm_wgrad_accumulate_
from te_models.kernels.gemm.reference import accumulate_product
from te_models.kernels.grouped_gemm import grouped_gemm_wgrad_accumulate_
from tests.compare import Operations, refused

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SPLITS = [[5, 0, 40, 3], [0, 0, 0], [0, 0, 48], [48, 0], [1, 130, 200], [7]]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bound(before: Tensor, magnitudes: Tensor, rows: int, grad: torch.dtype) -> Tensor:
    """Products and sum in float32, the sum rounded to the gradient's dtype."""
    return (4 * rows + 2) * UNIT[torch.float32] * magnitudes + UNIT[grad] * (before.abs() + magnitudes) + 1e-30


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_a_device_writes_a_product_where_it_belongs(grad: torch.dtype) -> None:
    """Not to a float32 buffer first: that of an output layer's weight took as much memory as the logits."""
    x = torch.empty(64, 48, dtype=torch.bfloat16, device="meta")
    main_grad = torch.empty(48, 48, dtype=grad, device="meta")
    with Operations() as calls:
        accumulate_product(main_grad, x.t(), x, False, None)
    assert calls.found[-1] is torch.ops.aten.mm.dtype_out
    assert len([call for call in calls.found if call is not torch.ops.aten.t.default]) == 1


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 31, 200])
def test_dense(rows: int, operand: torch.dtype, grad: torch.dtype, scaled: bool, accumulate: bool) -> None:
    dy, x = normal(rows, 150, seed=1, dtype=operand), normal(rows, 33, seed=2, dtype=operand)
    before = normal(150, 33, seed=3, dtype=grad) if accumulate else torch.full((150, 33), float("nan"), dtype=grad)
    scale = torch.tensor(0.37) if scaled else None
    main_grad = before.clone()
    gemm_wgrad_accumulate_(main_grad, dy, x, accumulate, scale)
    start = before.double() if accumulate else torch.zeros(150, 33).double()
    factor = 1.0 if scale is None else scale.double()
    expected = start + factor * (dy.double().t() @ x.double())
    magnitudes = factor * (dy.double().abs().t() @ x.double().abs())
    assert ((main_grad.double() - expected).abs() <= bound(start, magnitudes, rows, grad)).all()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, 300])
def test_layouts_agree_bit_for_bit(rows: int, grad: torch.dtype, scaled: bool) -> None:
    """One matrix, one of a group, and a product that is written first and added after."""
    dy, x = normal(rows, 300, seed=1), normal(rows, 33, seed=2)
    before, scale = normal(300, 33, seed=3, dtype=grad), torch.tensor([0.37]) if scaled else None
    dense, grouped, written = before.clone(), before[None].clone(), torch.empty(300, 33)
    gemm_wgrad_accumulate_(dense, dy, x, True, None if scale is None else scale[0])
    grouped_gemm_wgrad_accumulate_(grouped, dy, x, torch.tensor([rows]), True, scale)
    gemm_wgrad_accumulate_(written, dy, x, False, None if scale is None else scale[0])
    assert torch.equal(dense, grouped[0]) and torch.equal(dense, before.clone().add_(written))


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8192, 4096, 2048), (1000, 1536, 640)], ids=str)
def test_dense_real_sizes(shape: tuple[int, int, int], grad: torch.dtype, scaled: bool, accumulate: bool) -> None:
    """Summed in float32, into a float32 gradient without a rounding to bfloat16 on the way."""
    device = torch.device("cuda")
    rows, outer, inner = shape
    dy, x = normal(rows, outer, seed=1).to(device), normal(rows, inner, seed=2).to(device)
    before = normal(outer, inner, seed=3, dtype=grad).to(device)
    main_grad = before.clone() if accumulate else torch.full_like(before, torch.nan)
    gemm_wgrad_accumulate_(main_grad, dy, x, accumulate, torch.tensor(0.37, device=device) if scaled else None)
    factor, start = 0.37 if scaled else 1.0, before.double() if accumulate else 0.0
    product = factor * (dy.double().t() @ x.double())
    error = (main_grad.double() - start - product).abs()
    sums = (2 * rows + 8) * UNIT[torch.float32] * factor * (dy.double().abs().t() @ x.double().abs())
    assert (error <= sums + 2.01 * UNIT[grad] * (product.abs() + (start + product).abs()) + 1e-30).all()
    # far below the bound on average; a product rounded to bfloat16 errs by 2^-9 of it
    assert error.norm() <= 2 * {torch.float32: 2.0**-14, torch.bfloat16: 2.0**-9}[grad] * (start + product).norm()


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", SPLITS)
def test_grouped(splits: list[int], grad: torch.dtype, accumulate: bool) -> None:
    groups, rows = len(splits), sum(splits) + 9  # the tail past the last group must not count
    dy, x = normal(rows, 24, seed=4), normal(rows, 17, seed=5)
    dy[sum(splits) :] = float("nan")
    before = normal(groups, 24, 17, seed=6, dtype=grad) if accumulate else torch.full((groups, 24, 17), torch.nan)
    main_grad, scale = before.to(grad, copy=True), torch.linspace(0.5, 2, groups)
    grouped_gemm_wgrad_accumulate_(main_grad, dy, x, torch.tensor(splits), accumulate, scale)
    begin = 0
    for g, size in enumerate(splits):
        left, right = dy[begin : begin + size].double(), x[begin : begin + size].double()
        begin += size
        start = before[g].double() if accumulate else torch.zeros(24, 17).double()
        if size == 0:
            assert torch.equal(main_grad[g].double(), start)
        factor = scale[g].double()
        magnitudes = factor * (left.abs().t() @ right.abs())
        error = (main_grad[g].double() - start - factor * (left.t() @ right)).abs()
        assert (error <= bound(start, magnitudes, size, grad)).all()


def test_wrong_shapes_and_dtypes_are_errors() -> None:
    dy, x = torch.ones(4, 3), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"main_grad is \(2, 3\), but the weight gradient is \(3, 2\)"):
        gemm_wgrad_accumulate_(torch.zeros(2, 3), dy, x)
    refused(lambda: gemm_wgrad_accumulate_(torch.zeros(3, 2, dtype=torch.float16), dy, x), "main_grad is torch.float16")
    refused(lambda: gemm_wgrad_accumulate_(torch.zeros(3, 2), dy, torch.ones(3, 2)), "dy has 4 rows and x has 3")
    refused(lambda: grouped_gemm_wgrad_accumulate_(torch.zeros(3, 2), dy, x, torch.tensor([4])), "main_grad is (3, 2)")


class _Linear(torch.autograd.Function):
    """y = x w^T whose backward adds the weight gradient to main_grad and returns none."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, main_grad: Tensor, m_splits: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, m_splits)
        ctx.main_grad = main_grad
        return x @ (weight if m_splits is None else weight[0]).t()

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, m_splits = ctx.saved_tensors
        if m_splits is None:
            gemm_wgrad_accumulate_(ctx.main_grad, dy, x)
            return dy @ weight, None, None, None
        grouped_gemm_wgrad_accumulate_(ctx.main_grad, dy, x, m_splits)
        return dy @ weight[0], None, None, None


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_backward_adds_into_the_given_memory(backend: str, grouped: bool) -> None:
    """Step after step into one tensor, in place: its memory stays where it is, its numbers are the eager ones."""

    def step(x: Tensor, weight: Tensor, main_grad: Tensor, m_splits: Tensor | None) -> Tensor:
        return _Linear.apply(x.relu(), weight, main_grad, m_splits).square().sum()

    shape = (2, 6, 8) if grouped else (6, 8)
    splits = torch.tensor([3, 2]) if grouped else None
    weight = normal(*shape, seed=1, dtype=torch.float32).requires_grad_()
    eager, compiled = torch.zeros(shape), torch.zeros(shape)
    address = compiled.data_ptr()
    run = torch.compile(step, fullgraph=True, backend=backend)
    for seed in (2, 3):
        x = normal(5, 8, seed=seed, dtype=torch.float32).requires_grad_()
        step(x, weight, eager, splits).backward()
        run(x, weight, compiled, splits).backward()
    assert compiled.data_ptr() == address
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert eager.abs().sum() > 1
