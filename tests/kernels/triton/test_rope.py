"""Rotation kernel: equal to the reference to the last bit, forward and backward, for every layout."""

import pytest
import torch

from te_models.kernels.rope import op, reference
from tests.kernels.triton.op_inputs import rope_inputs as inputs

# B, S, N, D, rotated channels, tables per batch
CASES = [
    *((1, 1, 1, 2, 2, 1), (2, 5, 3, 16, 16, 1), (2, 3, 5, 20, 12, 2), (1, 2, 33, 130, 64, 1), (3, 2, 2, 80, 80, 3)),
    *((1, 2, 70, 128, 128, 1), (0, 4, 2, 8, 8, 1), (2, 0, 2, 8, 8, 1)),
]
REAL = [(2, 4096, 40, 128, 128, 1), (1, 8192, 24, 192, 64, 1), (4, 333, 64, 80, 20, 4)]


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(device, case, style, dtype) -> None:
    check(device, case, style, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_equals_the_reference_real_sizes(device, case, style) -> None:
    check(device, case, style, torch.bfloat16)


def check(device, case, style, dtype) -> None:
    x, grad, cos, sin = inputs(case, dtype, device)
    x.requires_grad_()
    got = op.rope(x, cos, sin, style == "interleaved", False)
    expected = reference.apply_rope(x, cos, sin, style)
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got, expected)
    assert torch.equal(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


def test_heads_inside_a_projection(device) -> None:
    """q and k are slices of one tensor, their heads not contiguous across tokens; one slice starts at an odd place."""
    _, _, cos, sin = inputs((2, 3, 1, 8, 8, 1), torch.bfloat16, device)
    qkv = torch.randn(2, 3, 7 * 8 + 3, device=device).bfloat16()
    for begin, heads in ((0, 4), (32, 2), (51, 1)):
        x = qkv[..., begin : begin + 8 * heads].unflatten(-1, (heads, 8))
        assert torch.equal(op.rope(x, cos, sin, False, False), reference.apply_rope(x, cos, sin))
    transposed = torch.randn(2, 3, 8, 4, device=device).mT  # channels are not contiguous
    expected = reference.apply_rope(transposed, cos, sin, "interleaved")
    assert torch.equal(op.rope(transposed, cos, sin, True, False), expected)


def test_the_inverse_turns_back(device) -> None:
    x, _, cos, sin = inputs((2, 5, 3, 16, 16, 1), torch.float32, device)
    back = op.rope(op.rope(x, cos / 1.1, sin / 1.1, False, False), cos / 1.1, sin / 1.1, False, True)
    assert torch.allclose(back, x, atol=1e-5)


@pytest.mark.gpu
def test_tables_that_want_a_gradient_are_refused(device) -> None:
    x, _, cos, sin = inputs((1, 2, 1, 8, 8, 1), torch.float32, device)
    with pytest.raises(ValueError, match="want a gradient"):
        op.apply_rope(x, cos.requires_grad_(), sin)
