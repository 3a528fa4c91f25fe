"""Permutation kernels: equal to the reference to the last bit, but for the inner products, which are sums."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.permute import op, reference
from te_models.kernels.permute.reference import Permutation
from tests.kernels.triton.op_inputs import routed

F32 = 2.0**-24

# T, K, E, H, align
CASES = [
    *((1, 1, 1, 1, 1), (15, 2, 4, 17, 1), (17, 3, 5, 33, 4), (65, 2, 8, 129, 16), (7, 8, 8, 1000, 32)),
    *((3, 2, 127, 2049, 1), (0, 2, 4, 8, 16), (5, 2, 4, 0, 1)),
]
REAL = [(32768, 8, 128, 2048, 1), (8192, 2, 8, 4096, 128), (4097, 6, 64, 1408, 16), (1, 8, 256, 7168, 128)]


def from_op(indices: Tensor, experts: int, align: int) -> Permutation:
    *fields, padding = op.sort_by_expert_op(indices, experts, align)
    return Permutation(*fields, padding if align > 1 else None)


@pytest.mark.sentinels(
    *("dtype0-False-case0", "dtype1-True-case1", "dtype0-True-case2", "dtype1-False-case3", "dtype0-False-case4"),
    "dtype1-True-case6",
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sort(device, case, skewed, dtype) -> None:
    check_sort(device, case, skewed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("skewed", [False, True])
def test_sort_real_sizes(device, case, skewed) -> None:
    check_sort(device, case, skewed, torch.int64)


def check_sort(device, case, skewed, dtype) -> None:
    tokens, topk, experts, _, align = case
    indices = routed(tokens, topk, experts, device, skewed).to(dtype)
    wanted = reference.sort_by_expert(indices, experts, align)
    for got, expected in zip(from_op(indices, experts, align), wanted, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or (got.dtype == torch.int64 and torch.equal(got, expected))


@pytest.mark.slow
def test_sort_over_many_chunks(device) -> None:
    """With 512 experts a chunk holds 16 slots, so 60 tokens make a running sum over 8 chunks."""
    check_sort(device, (60, 2, 512, 0, 8), True, torch.int64)


def test_running_sums_over_several_blocks(device) -> None:
    from te_models.kernels.permute import triton_sort

    counts = torch.randint(0, 9, (21, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32).to(device)
    expected = counts.cumsum(0) - counts
    total = counts.sum(0)
    tokens = torch.full((3,), -1, device=device)
    triton_sort.sort_scan_kernel[(3,)](counts, tokens, 21, E=3, B=8)
    assert torch.equal(counts, expected.to(torch.int32)) and torch.equal(tokens, total)


@pytest.mark.sentinels(
    *("torch.float32-case0", "torch.bfloat16-case1", "torch.float8_e4m3fn-case2", "torch.uint8-case5"),
    *("torch.float32-case6", "torch.bfloat16-case7"),
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_rows_move_unchanged(device, case, dtype) -> None:
    check_rows(device, case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows_move_unchanged_real_sizes(device, case, dtype) -> None:
    check_rows(device, case, dtype)


def check_rows(device, case, dtype) -> None:
    tokens, topk, experts, hidden, align = case
    p = reference.sort_by_expert(routed(tokens, topk, experts, device), experts, align)
    x = (torch.randn(hidden, tokens, generator=torch.Generator().manual_seed(1)) * 8).to(device).to(dtype).t()
    got = op.permute_rows(x, p.row_of_slot, p.padding_rows)
    expected = reference.gather_rows(x, p.slot_of_row, topk, align > 1)
    assert got.dtype == dtype and got.shape == expected.shape
    assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.sentinels(
    "torch.float32-case0", "torch.bfloat16-case1", "torch.float32-case2", "torch.float32-case6", "torch.float32-case7"
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_and_their_gradients(device, case, dtype) -> None:
    check_sums(device, case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
def test_sums_and_their_gradients_real_sizes(device, case) -> None:
    check_sums(device, case, torch.bfloat16)


def check_sums(device, case, dtype) -> None:
    tokens, topk, experts, hidden, align = case
    generator = torch.Generator().manual_seed(hidden)
    p = reference.sort_by_expert(routed(tokens, topk, experts, device), experts, align)
    y = torch.randn(p.slot_of_row.shape[0], hidden, generator=generator).to(dtype).to(device)
    if p.padding_rows is not None:
        y[p.padding_rows] = float("nan")  # nobody may read them
    weights = torch.rand(tokens, topk, generator=generator).to(device)
    for w in (None, weights):
        for out in (None, torch.float32):
            got = op.sum_slots(y, p.row_of_slot, w, out)
            assert got.dtype == (out or dtype)
            assert torch.equal(got, reference.sum_slots(y, p.row_of_slot, w, out))
    grad = torch.randn(tokens, hidden, generator=generator).to(dtype).to(device)
    wide = torch.randn(tokens, hidden, generator=generator).to(device)  # of sums that stayed float32
    dy, _ = op.unpermute_bwd(wide, y, weights, p.row_of_slot, p.padding_rows, True)
    assert dy.dtype == dtype
    assert torch.equal(dy, reference.spread_slots(wide, p.slot_of_row, weights, align > 1, dtype))
    dy, d_weights = op.unpermute_bwd(grad, y, weights, p.row_of_slot, p.padding_rows, True)
    assert torch.equal(dy, reference.spread_slots(grad, p.slot_of_row, weights, align > 1, dtype))
    products = grad.double()[:, None] * y.double()[p.row_of_slot]
    bound = (4 + hidden) * F32 * products.abs().sum(-1)
    assert d_weights.dtype == torch.float32
    assert ((d_weights.double() - products.sum(-1)).abs() <= bound).all()
    again, none = op.unpermute_bwd(grad, y, weights, p.row_of_slot, p.padding_rows, False)
    assert torch.equal(dy, again) and none.numel() == 0


def test_negative_zeros_keep_their_sign(device) -> None:
    p = reference.sort_by_expert(torch.tensor([[0, 1]], device=device), 2)
    assert torch.signbit(op.sum_slots(torch.full((2, 4), -0.0, device=device), p.row_of_slot, None)).all()
