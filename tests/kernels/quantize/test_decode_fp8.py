"""FP8 to float32 by integer operations gives what torch's cast gives, for every byte."""

import pytest
import torch

from te_models.kernels.quantize import fp8_to_float


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("repeats", [1, 64], ids=["small", "large"])
def test_every_byte(dtype: torch.dtype, repeats: int) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(repeats).view(dtype)
    found, expected = fp8_to_float(data), data.to(torch.float32)
    assert found.dtype == torch.float32
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan) and nan.sum() == repeats * (2 if dtype is torch.float8_e4m3fn else 6)
    # as integers, so that the sign of a zero counts
    assert torch.equal(found[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def test_transposed_and_strided_data() -> None:
    data = torch.randn(192, 256).to(torch.float8_e4m3fn)
    for view in (data.t(), data[:, ::2], data[3:].reshape(7, 27, 256).mT):
        assert torch.equal(fp8_to_float(view), view.float())


def test_fake_tensors_and_the_compiler_see_the_cast() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    data = torch.randn(128, 128).to(torch.float8_e4m3fn)
    with FakeTensorMode() as mode:
        assert fp8_to_float(mode.from_tensor(data)).shape == data.shape
    assert torch.equal(torch.compile(fp8_to_float, fullgraph=True, backend="aot_eager")(data), data.float())
