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
# 128-blocks and MX copies of both sides, K along the rows: addresses and scales, no sums (at most 96 bytes)
MAY_SPILL = ("wgrad 128-blocks", "wgrad mxfp8", "dense mxfp8, 64 rows")


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


def test_the_budget_spills_no_sums_and_fits(budget) -> None:
    for kernels in budget["kernels"].values():
        assert len(kernels) > 100
        for name, taken in kernels.items():
            assert taken["spilled"] <= (96 if name.startswith(MAY_SPILL) else 0), name
            assert taken["shared"] <= SHARED_MEMORY, name
            assert taken["registers"] <= 255, name


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
