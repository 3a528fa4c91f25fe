"""E8M0 scales that are looked up are those of the formulas, for every amax that a 16-bit number can be."""

import pytest
import torch

from te_models.kernels.quantize.fp8 import cpu as e8m0_table
from te_models.kernels.quantize.fp8 import reference


@pytest.mark.matrix
@pytest.mark.parametrize("fp8_dtype", (torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
@pytest.mark.parametrize("block", ((1, 32), (32, 1), (32, 32)), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_magnitude(dtype: torch.dtype, block: tuple[int, int], fp8_dtype: torch.dtype) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    # one number in each block, the rest of it is padding
    x = torch.zeros(block[0], 0x10000 * block[1], dtype=dtype)
    x[block[0] // 2, block[1] // 2 :: block[1]] = numbers
    looked_up = reference.block_scales(x, block, fp8_dtype, "e8m0")
    by_formula = reference.block_scales(x.float(), block, fp8_dtype, "e8m0")
    for found, wanted in zip(looked_up, by_formula, strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_only_sixteen_bits_outside_of_the_compiler_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    look_up = e8m0_table.look_up
    monkeypatch.setattr(reference, "look_up", lambda m, d, *f: (asked.append(d), look_up(m, d, *f))[1])
    for dtype in (torch.bfloat16, torch.float32):
        reference.block_scales(torch.ones(32, 64, dtype=dtype), (1, 32), torch.float8_e4m3fn, "e8m0")
    assert asked == [torch.bfloat16]
