"""What the kernels take of a GPU stays within budget.json: registers, spills, shared memory, wide stores.

`python -m tests.kernels.triton.hopper.hopper_budget --write` rewrites the budget.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, can_compile, in_child

PROGRAM = "tests.kernels.triton.hopper.hopper_budget"
# What still spills at the benchmarked shapes, in bytes of a thread: addresses, and one tile of several that the
# autotuner times.
SPILLS = {
    ("100", "grouped mxfp8, 4096 rows"): 8,
    ("100", "cast nvfp4, both, stochastic: quantize_nvfp4_kernel, TILE_R 32, TILE_C 64"): 48,
}
# numbers per row, or per part of a row, and an amax, which is added atomically
NARROW = ("column_sum", "norm_bwd_sums", "sort_", "router_topk_fwd", "cross_entropy_fwd", "amax_kernel")


@pytest.fixture(scope="module")
def budget() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("budget.json").read_text())


def hold(found: dict[str, Any], budget: dict[str, Any]) -> None:
    """Compare measured resources with the budget; registers only where the same compiler assigned them."""
    same = found["triton"] == budget["triton"]
    over = {}
    for capability, kernels in found["kernels"].items():
        allowed = budget["kernels"][capability]
        for name, taken in kernels.items():
            if name not in allowed and not same:
                continue  # another compiler's autotuner may prune other tiles
            most = allowed[name]
            worse = taken["spilled"] > most["spilled"] or taken["shared"] > most["shared"]
            worse = worse or (same and (taken["registers"] > most["registers"] or taken["stores"] != most["stores"]))
            if worse:
                over[f"{capability} {name}"] = taken
    assert over == {}


def test_the_budget_fits_and_spills_no_more_than_is_known(budget) -> None:
    assert budget["kernels"].keys() == {"90", "100"}
    spills = {}
    for capability, kernels in budget["kernels"].items():
        assert len(kernels) > 100
        for name, taken in kernels.items():
            assert taken["shared"] <= SHARED_MEMORY, name
            if taken["spilled"]:
                spills[capability, name.partition(", num_warps")[0]] = taken["spilled"]
    assert spills == SPILLS


def test_the_budget_stores_16_bytes_at_once(budget) -> None:
    """But where a kernel writes a few numbers of each row, a norm that leaves its result to a second kernel among
    them."""
    for kernels in budget["kernels"].values():
        for name, taken in kernels.items():
            kernel = name.partition(": ")[2]
            statistics = kernel == "norm_fwd_kernel" and "norm, " in name and "long" not in name
            assert "16" in taken["stores"] or statistics or kernel.startswith(NARROW), name


@pytest.mark.slow
def test_a_backward_pass_of_long_rows_keeps_to_it(budget) -> None:
    """Over 16384 columns a program that held whole rows spilled 80 to 232 bytes per thread."""
    if (reason := can_compile()) is not None:
        pytest.skip(reason)
    found = in_child(PROGRAM, "--only", "rms norm backward, long")
    assert len(found["kernels"]["90"]) == 3
    hold(found, budget)


@pytest.mark.slow
def test_every_kernel_keeps_to_it(budget) -> None:
    if (reason := can_compile()) is not None:
        pytest.skip(reason)
    found = in_child(PROGRAM)
    if found["triton"] == budget["triton"]:
        assert found["kernels"].keys() == budget["kernels"].keys()
        for capability, kernels in found["kernels"].items():
            assert kernels.keys() == budget["kernels"][capability].keys()
    hold(found, budget)
