"""The GEMM kernels compiled for compute capability 9.0: they fit, use the tensor cores, and keep sums in registers."""

from __future__ import annotations

import itertools

import pytest

from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, can_compile, in_child

SMALLER = 101376  # bytes of shared memory at compute capability 8.6, 8.9 and 12.0

Summaries = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def compiled() -> Summaries:
    """Compile all of them once: some minutes the first time."""
    reason = can_compile()
    if reason is not None:
        pytest.skip(reason)
    return in_child("tests.kernels.triton.hopper.hopper_gemm")


@pytest.mark.slow
def test_shared_memory_fits(compiled: Summaries) -> None:
    assert max(found["shared"] for found in compiled.values()) <= SHARED_MEMORY


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("narrow", [True, False])
def test_values_in_flight_fit_a_smaller_gpu(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the pipeline holds a stage less than it has; a wide tile's did not fit."""
    from tests.kernels.triton.hopper import hopper_gemm
    from tests.kernels.triton.hopper.hopper_gemm import tile

    wide = []
    for memory in (SMALLER, SHARED_MEMORY):
        monkeypatch.setattr(tile, "shared_memory", lambda device, memory=memory: memory)
        for mode, rows in itertools.product((tile.NONE, tile.PER_TENSOR, tile.BLOCK_128, tile.MICRO), (1, 64, 4096)):
            side = hopper_gemm.side(mode)
            m, n, k, _, stages = tile.config(side, rows, 4096, narrow=narrow)
            assert (stages - 1) * (m + n) * k * side.data.element_size() <= memory
            wide += [memory] * (n > 128)
    assert wide == ([] if narrow else [SHARED_MEMORY] * 2)


@pytest.mark.slow
def test_sums_stay_in_registers(compiled: Summaries) -> None:
    assert {name: found["stack"] for name, found in compiled.items() if found["stack"]} == {}


@pytest.mark.slow
def test_tensor_cores_run_asynchronously(compiled: Summaries) -> None:
    """From 64 rows on; one product is in flight where no scales have to be applied to it first."""
    for name, found in compiled.items():
        if ", 16 rows" not in name and name != "transpose":
            assert found["wgmma"] > 0, name
            assert found["in_flight"] == (0 if "128-blocks" in name or "mxfp8" in name else 1), name


@pytest.mark.slow
def test_loads_are_asynchronous_copies_and_stores_are_wide(compiled: Summaries) -> None:
    for name, found in compiled.items():
        assert found["wide"] > 0, name
        assert (found["copies"] > 0) == (name != "transpose"), name
