"""The GEMM kernels compiled for compute capability 9.0: they fit, use the tensor cores, and keep sums in registers."""

from __future__ import annotations

import pytest

from tests.kernels.triton.hopper import SHARED_MEMORY, can_compile, in_child

Summaries = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def compiled() -> Summaries:
    """Compile all of them once, about 20 seconds the first time."""
    reason = can_compile()
    if reason is not None:
        pytest.skip(reason)
    return in_child("tests.kernels.triton.hopper_gemm")


def test_shared_memory_fits(compiled: Summaries) -> None:
    assert max(found["shared"] for found in compiled.values()) <= SHARED_MEMORY


def test_sums_stay_in_registers(compiled: Summaries) -> None:
    """A few spilled addresses cost little; an accumulator is 256 bytes per thread."""
    assert {name: found["stack"] for name, found in compiled.items() if found["stack"] > 96} == {}


def test_tensor_cores_run_asynchronously(compiled: Summaries) -> None:
    """From 64 rows on; one product is in flight where no scales have to be applied to it first."""
    for name, found in compiled.items():
        if ", 16 rows" not in name and name != "transpose":
            assert found["wgmma"] > 0, name
            assert found["in_flight"] == (0 if "128-blocks" in name or "mxfp8" in name else 1), name


def test_loads_are_asynchronous_copies_and_stores_are_wide(compiled: Summaries) -> None:
    for name, found in compiled.items():
        assert found["wide"] > 0, name
        assert (found["copies"] > 0) == (name != "transpose"), name
