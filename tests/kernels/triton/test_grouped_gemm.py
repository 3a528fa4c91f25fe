"""Triton grouped GEMMs against float64 products group by group: every edge of the splits, plain and quantized."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.gemm import ScaledOperand
from te_models.kernels.grouped_gemm import ROW_ALIGNMENT
from tests.kernels.gemm.scaled_cases import UNIT, assert_within, exact, normal, quantized
from tests.kernels.triton.op_inputs import GROUPED_FORMATS as FORMATS
from tests.kernels.triton.op_inputs import quantized_rows, ranges

# rows past the last group; empty groups first, last, in the middle, all; one group; all rows in one; ragged; many
SPLITS = [
    *(([5, 0, 20, 3], 4), ([0, 0], 3), ([0, 0], 0), ([0, 33, 0], 0), ([17], 0), ([1, 16, 16, 1], 2)),
    ([0, 2, 1] * 6, 5),
]


def exact_rows(operand: ScaledOperand, begin: int, end: int, g: int, dim: int) -> Tensor:
    """What one group's rows stand for, the contracted dimension last."""
    if operand.block is None:
        data = operand.data[begin:end] if dim else operand.data[:, begin:end]
        return data.double() * operand.scale_inv[g].double()
    return exact(operand)[begin:end] if dim else exact(operand)[:, begin:end]


@pytest.mark.sentinels(
    "[5, 0, 20, 3]-4-True-dtype0", "[0, 33, 0]-0-True-dtype0", "[0, 0]-3-False-dtype1", "[17]-0-True-dtype0"
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("splits", "tail"), SPLITS, ids=str)
def test_plain_rows(splits: list[int], tail: int, transpose: bool, dtype: torch.dtype, device: torch.device) -> None:
    from te_models.kernels.grouped_gemm import triton as kernels

    rows, outer, inner = sum(splits) + tail, 37, 40
    x = normal(rows, inner, seed=1, dtype=dtype, device=device)
    b = normal(len(splits), outer, inner, seed=2, dtype=dtype, device=device)
    b = b if transpose else b.mT.contiguous().mT  # dgrad reads the weight the other way round
    left, right = (kernels.TileOperand.unscaled(t) for t in (x, b))
    y = kernels.grouped_gemm(left, right, torch.tensor(splits, device=device), x.new_empty(rows, outer))
    for g, (begin, end) in enumerate(ranges(splits)):
        assert_within(y[begin:end], x[begin:end].double(), b[g].double())
    assert not y[sum(splits) :].any()


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("splits", "tail"), SPLITS, ids=str)
@pytest.mark.parametrize("formats", FORMATS)
def test_quantized_rows(formats: str, splits: list[int], tail: int, device: torch.device) -> None:
    from te_models.kernels.grouped_gemm import triton as kernels

    rows, outer, inner = sum(splits) + tail, 21, 150
    left = quantized_rows(normal(rows, inner, seed=3, device=device), splits, *FORMATS[formats][0], dim=1)
    right = quantized(normal(len(splits), outer, inner, seed=4, device=device), *FORMATS[formats][1])
    out = torch.empty(rows, outer, device=device)
    splits_tensor = torch.tensor(splits, dtype=torch.int32, device=device)
    y = kernels.grouped_gemm(kernels.TileOperand.of(left), kernels.TileOperand.of(right), splits_tensor, out)
    for g, (begin, end) in enumerate(ranges(splits)):
        assert_within(y[begin:end], exact_rows(left, begin, end, g, 1), exact(right)[g])
    assert not y[sum(splits) :].any()


@pytest.mark.sentinels("[5, 0, 20, 3]-4-True", "[0, 0]-3-False", "[0, 33, 0]-0-True", "[17]-0-True")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("splits", "tail"), SPLITS, ids=str)
def test_plain_wgrad(splits: list[int], tail: int, accumulate: bool, device: torch.device) -> None:
    from te_models.kernels.grouped_gemm import triton as kernels

    rows = sum(splits) + tail
    dy, x = normal(rows, 19, seed=5, device=device), normal(rows, 37, seed=6, device=device)
    dy[sum(splits) :] = float("nan")  # what is past the last group must not count
    factor = torch.linspace(0.5, 2, len(splits), device=device)
    before = normal(len(splits), 19, 37, seed=7, dtype=torch.float32, device=device)
    out = before.clone() if accumulate else torch.empty_like(before)
    operands = kernels.TileOperand.unscaled(dy.t()), kernels.TileOperand.unscaled(x.t())
    kernels.grouped_gemm_wgrad(
        *operands, torch.tensor(splits, device=device), out, factor=factor, accumulate=accumulate
    )
    for g, (begin, end) in enumerate(ranges(splits)):
        check_wgrad(out[g], before[g], factor[g] * dy[begin:end].double().t(), x[begin:end].double().t(), accumulate)


def check_wgrad(out: Tensor, before: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
    if accumulate and left.shape[1] == 0:
        assert torch.equal(out, before)
    if accumulate:
        identity = torch.eye(left.shape[0], dtype=torch.float64, device=left.device)
        left, right = torch.cat((left, identity), 1), torch.cat((right, before.double().t()), 1)
    assert_within(out, left, right)


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("groups", [[1, 0, 2], [0, 0], [2]], ids=str)
@pytest.mark.parametrize("formats", FORMATS)
def test_quantized_wgrad(formats: str, groups: list[int], accumulate: bool, device: torch.device) -> None:
    from te_models.kernels.grouped_gemm import triton as kernels

    (kind, block), _ = FORMATS[formats]
    splits = [ROW_ALIGNMENT[kind] * size for size in groups]
    rows = sum(splits) + ROW_ALIGNMENT[kind]
    left = quantized_rows(normal(rows, 18, seed=8, device=device), splits, kind, block, dim=0)
    right = quantized_rows(normal(rows, 33, seed=9, device=device), splits, kind, block, dim=0)
    before = normal(len(splits), 18, 33, seed=10, dtype=torch.float32, device=device)
    out = before.clone() if accumulate else torch.empty_like(before)
    operands = kernels.TileOperand.of(left), kernels.TileOperand.of(right)
    kernels.grouped_gemm_wgrad(*operands, torch.tensor(splits, device=device), out, accumulate=accumulate)
    for g, (begin, end) in enumerate(ranges(splits)):
        a, b = (exact_rows(side, begin, end, g, 0) for side in (left, right))
        check_wgrad(out[g], before[g], a, b, accumulate)


def test_splits_beyond_the_rows_stay_inside_the_memory(device: torch.device) -> None:
    """Nobody can check them without waiting for the device; they are cut off."""
    from te_models.kernels.grouped_gemm import triton as kernels

    x, b = normal(20, 32, seed=11, device=device), normal(3, 16, 32, seed=12, device=device)
    splits = torch.tensor([12, 50, 7], device=device)
    left, right = (kernels.TileOperand.unscaled(t) for t in (x, b))
    y = kernels.grouped_gemm(left, right, splits, x.new_empty(20, 16))
    assert_within(y[:12], x[:12].double(), b[0].double())
    assert_within(y[12:], x[12:].double(), b[1].double())
    out = torch.full((3, 32, 32), float("nan"), device=device)
    kernels.grouped_gemm_wgrad(kernels.TileOperand.unscaled(x.t()), kernels.TileOperand.unscaled(x.t()), splits, out)
    assert_within(out[1], x[12:].double().t(), x[12:].double().t())
    assert not out[2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32768, 2048, 7168, 8), (16384, 1536, 2048, 128), (4096, 4096, 14336, 8)], ids=str)
@pytest.mark.parametrize("formats", ["plain", *FORMATS])
def test_real_sizes(formats: str, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """fprop and wgrad on random splits: within the bound, the same bits when run again."""
    from te_models.kernels.grouped_gemm import triton as kernels

    total, outer, inner, groups = shape
    kind, block = FORMATS.get(formats, (("", None),))[0]
    align = ROW_ALIGNMENT.get(kind, 1)
    weights = torch.rand(groups, generator=torch.Generator().manual_seed(0))
    splits = (weights / weights.sum() * (total - align * groups)).long() // align * align
    splits[1] = 0
    sizes, count = splits.tolist(), splits.to(device)
    x, dy = normal(total, inner, seed=1, device=device), normal(total, outer, seed=2, device=device)
    w = normal(groups, outer, inner, seed=3, device=device)
    if formats == "plain":
        left, right, loose = x, w, 0.0
        a, b, *columns = (kernels.TileOperand.unscaled(t) for t in (x, w, dy.t(), x.t()))
    else:
        left = quantized_rows(x, sizes, kind, block, dim=1)
        right = quantized(w, *FORMATS[formats][1])
        grads = [quantized_rows(side, sizes, kind, block, dim=0) for side in (dy, x)]
        a, b = kernels.TileOperand.of(left), kernels.TileOperand.of(right)
        columns = tuple(map(kernels.TileOperand.of, grads))
        # tensor cores of compute capability 9 keep about 14 bits of a sum within 128 values; MX runs in bfloat16
        loose = 0.0 if kind == "e8m0" else 2.0**-12
    runs = [kernels.grouped_gemm(a, b, count, torch.empty(total, outer, device=device)) for _ in range(2)]
    wgrads = [kernels.grouped_gemm_wgrad(*columns, count, torch.empty_like(w, dtype=torch.float32)) for _ in range(2)]
    assert torch.equal(*runs) and torch.equal(*wgrads)
    for g, (begin, end) in enumerate(ranges(sizes)):
        if formats == "plain":
            rows, weight = x[begin:end].double(), w[g].double()
            operands = dy[begin:end].double().t(), x[begin:end].double().t()
        else:
            rows, weight = exact_rows(left, begin, end, g, 1), exact(right.member(g))
            operands = [exact_rows(side, begin, end, g, 0) for side in grads]
        assert_within(runs[0][begin:end], rows, weight, unit=UNIT[torch.float32] + loose)
        assert_within(wgrads[0][g], *operands, unit=UNIT[torch.float32] + loose)
    assert not runs[0][sum(sizes) :].any()
