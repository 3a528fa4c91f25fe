"""The kernels that are no GEMM compiled for compute capability 9.0: they fit, and sums keep their order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, can_compile, in_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Compile all of them once: some minutes the first time."""
    reason = can_compile()
    if reason is not None:
        pytest.skip(reason)
    found = in_child("tests.kernels.triton.hopper.hopper_rows")
    assert len(found) > 50
    return found


def test_every_program_fits(compiled) -> None:
    assert max(found["shared"] for found in compiled.values()) <= SHARED_MEMORY
    assert {name: found["stack"] for name, found in compiled.items() if found["stack"]} == {}


def test_what_moves_most_moves_wide(compiled) -> None:
    """16 bytes a load or store, but where a program works on a few numbers of each token."""
    assert [name for name, found in compiled.items() if not found["wide"] and not name.startswith("sort")] == []


def test_transposed_copies_are_stored_wide(compiled) -> None:
    """Where there are a multiple of 16 rows. A kernel that is not told stores them one byte at a time."""
    stores = {name: found["bytes"] for name, found in compiled.items() if name.endswith("quantize_kernel")}
    assert len(stores) >= 20
    # one byte of a scale
    assert {name: count for name, count in stores.items() if count > 1} == {}


@pytest.mark.parametrize("kind", ["rms norm", "layer norm"])
def test_statistics_are_summed_in_one_order_whatever_the_result_is(compiled, kind) -> None:
    """Otherwise the quantized result would not be the plain one's, bit for bit."""
    order = compiled[f"{kind}: norm_fwd_kernel"]["sums"]
    assert len(order) == (2 if kind == "layer norm" else 1)
    others = {
        name: found["sums"]
        for name, found in compiled.items()
        if name.startswith(f"{kind}, ") and (name.endswith("norm_fwd_kernel") or ", rows:" in name)
    }
    assert len(others) == 6
    assert others == dict.fromkeys(others, order)


def test_no_compiler_chooses_what_is_rounded(compiled) -> None:
    """A product that is added may be rounded first or not, and one kernel's choice is not the other's: a LayerNorm of
    5120 float32 columns was quantized from other last bits than those of its plain result."""
    forward = {name: found["fused"] for name, found in compiled.items() if re.search(r"norm_(fwd|quantize)_", name)}
    assert len(forward) >= 20
    assert forward == dict.fromkeys(forward, 0)
