"""Every sample of every operation with a kernel for a GPU returns what its definition says, and what is near enough."""

import math

import pytest
import torch

from bench.gpu.first_run.kernels import check, samples
from bench.gpu.first_run.setting import Setting
from tests.kernels.triton.definitions import CPU_ONLY, SUMS, Definition, definitions, difference
from tests.kernels.triton.test_registered_ops import OPERATIONS

DEFINED = definitions()
EVERYDAY = ("scaled_grouped_gemm", "quantize_nvfp4", "activation_quantized", "router_topk")
"""Operations that show every kind of definition: on a CPU, of its own, of another operation, of sums."""


def test_every_operation_has_one_or_no_kernel() -> None:
    assert DEFINED.keys() | CPU_ONLY == OPERATIONS.keys() and not DEFINED.keys() & CPU_ONLY


@pytest.fixture(scope="module")
def arguments() -> dict[str, list]:
    return samples(DEFINED)


@pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation:UserWarning")
@pytest.mark.parametrize(
    ("name", "few"),
    [
        pytest.param(name, few, marks=() if few and name in EVERYDAY else pytest.mark.slow)
        for name in DEFINED
        for few in (True, False)
    ],
)
def test_results_are_as_defined(name: str, few: bool, device: torch.device, arguments: dict[str, list]) -> None:
    """few: the first and the last sample."""
    setting = Setting(device, rehearse=device.type == "cpu")
    for given in [arguments[name][0], arguments[name][-1]] if few else arguments[name]:
        check(setting, name, given, DEFINED[name])


EXACT, NEAR = Definition(torch.clone), Definition(torch.clone, SUMS)
ONES = torch.ones(3, 4)


def changed(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = ONES.clone()
    x[1, 2] = value
    return x.to(dtype)


@pytest.mark.parametrize("definition", [EXACT, NEAR])
def test_equal_results_are_right(definition: Definition) -> None:
    for value in (1.0, 0.0, -math.inf, math.nan):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
            assert difference(changed(value, dtype), changed(value, dtype), definition) is None
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3), definition) is None


def test_other_bits_are_wrong() -> None:
    words = "1 of 12 values differ, the first at 6: 2 instead of 1"
    assert difference(changed(2.0), ONES, EXACT) == words
    assert difference(changed(2.0, torch.float8_e4m3fn), ONES.to(torch.float8_e4m3fn), NEAR) == words
    assert difference(changed(2).long(), ONES.long(), NEAR) == words
    assert "-0 instead of 0" in str(difference(changed(-0.0), changed(0.0), EXACT))
    assert "1 of 12 values differ" in str(difference(changed(math.nan), ONES, EXACT))
    wrong_shape = "it is torch.float32 [3, 4] and should be torch.float64 [12]"
    assert difference(ONES, ONES.double().flatten(), EXACT) == wrong_shape


def test_sums_may_be_a_little_off() -> None:
    assert difference(changed(1 + 2.0**-17), ONES, NEAR) is None
    found = str(difference(changed(1 + 2.0**-10), ONES, NEAR))
    assert found.startswith("1 of 12 values are too far off, one by ") and "1.00098 instead of 1" in found
    assert difference(changed(1 + 2.0**-7, torch.bfloat16), ONES.bfloat16(), NEAR) is None
    assert difference(changed(math.nan), ONES, NEAR) == "1 of 12 values are not finite where they should be, or are"
    assert difference(changed(math.inf), changed(math.nan), NEAR) is not None
