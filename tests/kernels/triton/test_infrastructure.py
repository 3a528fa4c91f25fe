"""The fixtures that the kernel tests stand on."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def kernels(device: torch.device) -> SimpleNamespace:
    """Kernels defined once triton may be imported."""
    from tests.kernels.triton import tiny_kernel

    return SimpleNamespace(double=tiny_kernel.double, cast=tiny_kernel.cast)


def test_a_kernel_runs(device: torch.device, kernels: SimpleNamespace) -> None:
    x = torch.randn(37, device=device)
    assert torch.equal(kernels.double(x), 2 * x)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.bfloat16, 3e38), (torch.float16, 65504.0), (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)],
    ids=str,
)
def test_narrow_casts_round_to_nearest_even(device: torch.device, kernels: SimpleNamespace, dtype, limit) -> None:
    bits = torch.randint(-(2**31), 2**31, (3000,), generator=torch.Generator().manual_seed(0))
    spread = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    ties = torch.arange(1, 1000) / 64
    x = torch.cat([bits.to(torch.int32).view(torch.float32), spread, ties]).nan_to_num().clamp(-limit, limit)
    x = x.to(device)
    assert torch.equal(kernels.cast(x, dtype).float(), x.to(dtype).float())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_unwritten_memory_shows(dtype: torch.dtype) -> None:
    assert torch.empty(5, dtype=dtype).isnan().all()
    assert torch.empty(5, dtype=torch.uint8).tolist() == [255] * 5
