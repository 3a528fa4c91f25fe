"""Covering arrays: everything that they must cover is covered, and by fewer cells than there are."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.covering import UNKNOWN_SENTINELS, cell_of, chosen

CELLS = [dict(zip("abc", cell, strict=True)) for cell in itertools.product(range(4), range(3), range(5))]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_tuple_of_values_is_covered(strength: int) -> None:
    def covered(cells: list[dict]) -> set:
        return {pair for cell in cells for pair in itertools.combinations(sorted(cell.items()), strength)}

    found = [CELLS[i] for i in chosen(CELLS, strength)]
    assert covered(found) == covered(CELLS)
    assert len(found) <= {1: 5, 2: 26, 3: 60}[strength]


@pytest.mark.parametrize("n", [3])
def test_a_function_of_a_parameter_may_stand_for_it(n: int, request: pytest.FixtureRequest) -> None:
    assert cell_of(request.node, {"n": lambda n: n % 2}) == {"n": (int, 1)}


def test_cells_that_are_not_a_full_product_are_covered_too() -> None:
    cells = [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 0, "b": 2}]
    assert chosen(cells, 1) == [0, 1, 2]
    assert chosen(cells, 2) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [[2, 3], (2, 3)], ids=["list", "tuple"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flag", [True, 1])
def test_equal_parameters_are_one_value(
    flag: int, dtype: torch.dtype, shape: object, request: pytest.FixtureRequest
) -> None:
    found = cell_of(request.node)
    assert found["dtype"] == (torch.dtype, dtype) and found["flag"] == (type(flag), flag)
    assert found["shape"] == ((tuple, shape) if isinstance(shape, tuple) else id(shape))


def test_sentinels_are_cells() -> None:
    assert UNKNOWN_SENTINELS == []
