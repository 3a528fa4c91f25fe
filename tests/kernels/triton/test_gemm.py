"""The Triton scaled GEMM against float64 products of what its operands stand for."""

import pytest
import torch

from te_models.kernels.gemm.choice import against_formats
from tests.kernels.gemm.scaled_cases import E4M3, E5M2, SIDES, UNIT, assert_within, exact, normal, quantized

SHAPES = [(1, 1, 1), (17, 33, 40), (16, 16, 128), (5, 40, 300), (40, 19, 129)]


def multiply(left, right, out, **options):
    from te_models.kernels.gemm import triton as kernels

    assert against_formats(left, right) is None
    return kernels.scaled_gemm(left, right, out, **options)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sides", SIDES)
def test_products(sides: str, shape: tuple[int, int, int], device: torch.device) -> None:
    rows, columns, length = shape
    left = quantized(normal(rows, length, seed=1, device=device), *SIDES[sides][0])
    right = quantized(normal(columns, length, seed=2, device=device), *SIDES[sides][1])
    y = multiply(left, right, torch.empty(rows, columns, device=device))
    # a per-tensor product and each block's take two more multiplications, counted in the sum's bound
    assert_within(y, exact(left), exact(right))


@pytest.mark.parametrize("split", [True, False])
def test_mixed_formats_bias_and_bfloat16_output(split: bool, device: torch.device) -> None:
    left = quantized(normal(20, 150, seed=3, device=device), "per_tensor", None, E5M2)
    right = quantized(normal(18, 150, seed=4, device=device), "per_tensor", None, E4M3)
    bias = normal(18, seed=5, device=device)
    out = torch.empty(20, 18, dtype=torch.bfloat16, device=device)
    y = multiply(left, right, out, bias=bias, split_accumulation=split)
    a, b = exact(left), exact(right)
    with_bias = torch.cat((a, torch.ones_like(a[:, :1])), 1), torch.cat((b, bias.double()[:, None]), 1)
    # off, tensor cores of compute capability 9 keep about 14 bits of a sum
    unit = 2.0**-8 if split or device.type == "cpu" else 2.0**-8 + 150 * 2.0**-13
    assert_within(y, *with_bias, unit=unit)


@pytest.mark.parametrize("sides", ["per_tensor", "pow2 1x128 by 128x128", "mxfp8"])
def test_transposed_storage_and_accumulation(sides: str, device: torch.device) -> None:
    """A side may be a view of a copy stored the other way; the product may be added to what is there."""
    (kind_a, block_a), (kind_b, block_b) = SIDES[sides]
    a, b = normal(150, 20, seed=6, device=device), normal(150, 36, seed=7, device=device)
    left = quantized(a, kind_a, block_a and (block_a[1], block_a[0])).mT
    right = quantized(b, kind_b, block_b and (block_b[1], block_b[0])).mT
    assert left.data.stride(-1) != 1
    before = normal(20, 36, seed=8, dtype=torch.float32, device=device)
    out = before.clone()
    multiply(left, right, out, accumulate=True)
    one = torch.ones(20, 1, dtype=torch.float64, device=device)
    identity = torch.eye(20, dtype=torch.float64, device=device) * one
    assert_within(out, torch.cat((exact(left), identity), 1), torch.cat((exact(right), before.double().mT), 1))


def test_nan_scale_of_a_microscaled_block_reaches_its_products(device: torch.device) -> None:
    x = normal(16, 64, seed=9, device=device)
    x[3, 40] = float("nan")
    left, right = quantized(x, "e8m0", (1, 32)), quantized(normal(16, 64, seed=10, device=device), "e8m0", (1, 32))
    y = multiply(left, right, torch.empty(16, 16, device=device))
    assert y[3].isnan().all() and not y[[0, 1, 2, *range(4, 16)]].isnan().any()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(1, 1), (200, 130), (2, 130, 257), (3, 0, 5)], ids=str)
def test_copies_with_the_contracted_dimension_contiguous(shape: tuple[int, ...], device: torch.device) -> None:
    """Bit for bit, from the transposed view and from one without any contiguous dimension."""
    from te_models.kernels.gemm.operand import k_contiguous
    from te_models.kernels.gemm.triton import copy_transposed

    stored = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    for view in (stored.mT, stored.mT[..., ::2, :][..., ::2]):
        assert torch.equal(copy_transposed(view, torch.empty_like(view).contiguous()), view)
        copy = k_contiguous(view.view(E4M3) if view.stride(-2) == 1 else view)
        assert torch.equal(copy.view(torch.uint8), view)
        assert copy.numel() == 0 or copy.shape[-1] == 1 or copy.stride(-1) == 1
    assert k_contiguous(stored).data_ptr() == stored.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (8192, 2048, 7168), (1000, 1536, 640), (64, 7168, 2048)], ids=str
)
@pytest.mark.parametrize("sides", SIDES)
def test_real_sizes(sides: str, shape: tuple[int, int, int], device: torch.device) -> None:
    """Triton and the library where it takes the operands: within the bound, and the same bits when run again."""
    from te_models.kernels.gemm import native, scaled_gemm
    from te_models.kernels.gemm.backends import hardware

    rows, columns, length = shape
    left = quantized(normal(rows, length, seed=1, device=device), *SIDES[sides][0])
    right = quantized(normal(columns, length, seed=2, device=device), *SIDES[sides][1])
    a, b = exact(left), exact(right)
    first, second = (multiply(left, right, torch.empty(rows, columns, device=device)) for _ in range(2))
    assert torch.equal(first, second)
    # tensor cores of compute capability 9 keep about 14 bits within a 128-long block, MX runs in bfloat16
    loose = 0.0 if sides.startswith("mxfp8") else 2.0**-12
    assert_within(first, a, b, unit=2.0**-24 + loose)
    if native.reason_against(left, right, torch.bfloat16, hardware(device)) is None:
        assert_within(scaled_gemm(left, right, torch.bfloat16), a, b, unit=2.0**-8 + 2.0**-12)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 7168), (1000, 4097), (8, 2048, 1408)], ids=str)
def test_transposed_copies_of_real_sizes(shape: tuple[int, ...], device: torch.device) -> None:
    from te_models.kernels.gemm.operand import k_contiguous
    from te_models.kernels.gemm.triton import copy_transposed

    stored = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(copy_transposed(stored.mT, torch.empty_like(stored.mT).contiguous()), stored.mT)
    copy = k_contiguous(stored.mT.view(E4M3))
    assert torch.equal(copy.view(torch.uint8), stored.mT) and copy.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 4096, 8192), (1000, 640, 1536)], ids=str)
@pytest.mark.parametrize("sides", ["per_tensor", "pow2 1x128 by 1x128", "mxfp8"])
def test_real_weight_gradients_are_added_in_place(
    sides: str, shape: tuple[int, int, int], device: torch.device
) -> None:
    """Into a float32 gradient: added to what is there, and written over a NaN."""
    from te_models.kernels.gemm import scaled_gemm_accumulate_

    rows, columns, length = shape
    left = quantized(normal(rows, length, seed=1, device=device), *SIDES[sides][0])
    right = quantized(normal(columns, length, seed=2, device=device), *SIDES[sides][1])
    a, b = exact(left), exact(right)
    before = normal(rows, columns, seed=3, dtype=torch.float32, device=device)
    main_grad = before.clone()
    scaled_gemm_accumulate_(main_grad, left, right)
    added = main_grad.double() - before.double()
    # tensor cores of compute capability 9 keep about 14 bits within a 128-long block, MX runs in bfloat16
    loose = 0.0 if sides == "mxfp8" else 2.0**-12
    assert_within(added, a, b, unit=UNIT[torch.float32] + loose)
    if sides == "mxfp8":  # far below the bound on average; a product rounded to bfloat16 errs by 2^-10 of it
        assert (added - a @ b.mT).norm() <= 2.0**-13 * (a @ b.mT).norm()
    main_grad.fill_(float("nan"))
    scaled_gemm_accumulate_(main_grad, left, right, accumulate=False)
    assert_within(main_grad, a, b, unit=UNIT[torch.float32] + loose)
