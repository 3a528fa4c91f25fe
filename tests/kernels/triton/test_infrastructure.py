"""The fixtures that the kernel tests stand on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def kernels(device: torch.device) -> SimpleNamespace:
    """Kernels defined once triton may be imported."""
    from tests.kernels.triton import tiny_kernel

    return SimpleNamespace(double=tiny_kernel.double)


def test_a_kernel_runs(device: torch.device, kernels: SimpleNamespace) -> None:
    x = torch.randn(37, device=device)
    assert torch.equal(kernels.double(x), 2 * x)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_unwritten_memory_shows(dtype: torch.dtype) -> None:
    assert torch.empty(5, dtype=dtype).isnan().all()
    assert torch.empty(5, dtype=torch.uint8).tolist() == [255] * 5
