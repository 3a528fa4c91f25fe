"""The norm of a large tensor is exact to a part in a million, where one float32 sum is off by a part in a thousand."""

import pytest
import torch

from te_models.layers.optimizers.norm import PIECE, tensor_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_elements_are_added_up_exactly(dtype: torch.dtype) -> None:
    x = torch.randn(64, PIECE // 4 + 3).to(dtype)
    exact = torch.linalg.vector_norm(x, dtype=torch.float64)
    for tensor in (x, x.t(), x[:, 1:]):
        found = tensor_norm(tensor)
        assert found.dtype == torch.float32 and found.shape == ()
    assert abs(tensor_norm(x).double() / exact - 1) < 1e-6


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE])
def test_every_element_counts_once(size: int) -> None:
    found = tensor_norm(torch.full((size,), 0.5, dtype=torch.bfloat16)).item()
    assert found == pytest.approx(0.5 * size**0.5, rel=1e-6)


@pytest.mark.parametrize(("value", "expected"), [(float("inf"), "inf"), (float("nan"), "nan"), (1e30, "inf")])
def test_what_is_not_finite_shows(value: float, expected: str) -> None:
    x = torch.ones(PIECE + 1)
    x[-1] = value
    assert str(tensor_norm(x).item()) == expected
