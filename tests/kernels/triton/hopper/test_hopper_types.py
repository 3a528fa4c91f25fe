"""Every launch of every registered operation is a typed program for a GPU, which the interpreter does not ask."""

from __future__ import annotations

import pytest

from tests.kernels.triton.hopper.compiler import can_compile, in_child


@pytest.mark.slow
@pytest.mark.parametrize(("most", "launches"), [("1", 30), (None, 400)])
def test_launches_are_well_typed(most: str | None, launches: int) -> None:
    """most: of each kernel. Rows were permuted without padding by a kernel that added a number to the missing pointer
    of padding rows, in a branch that no launch takes: an error on every GPU."""
    reason = can_compile()
    if reason is not None:
        pytest.skip(reason)
    found = in_child("tests.kernels.triton.hopper.hopper_types", *([] if most is None else [most]))
    assert found["failed"] == {}
    assert found["launches"] > launches
    assert found["kernels"] > 30
