"""Covering arrays: everything that they must cover is covered, and by fewer cells than there are."""

import contextlib
import itertools
import math
import shlex
from types import SimpleNamespace

import pytest
import torch

from tests import covering
from tests.covering import (
    CPU_TIMES,
    UNKNOWN_SENTINELS,
    cell_of,
    chosen,
    dearest_files,
    finish,
    mark_uncovered,
    seconds_of_files,
    selected,
    start,
)
from tests.structure.tree import ROOT

CELLS = [dict(zip("abc", cell, strict=True)) for cell in itertools.product(range(4), range(3), range(5))]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_tuple_of_values_is_covered(strength: int) -> None:
    def covered(cells: list[dict]) -> set:
        return {pair for cell in cells for pair in itertools.combinations(sorted(cell.items()), strength)}

    found = [CELLS[i] for i in chosen(CELLS, strength)]
    assert covered(found) == covered(CELLS) and len(found) <= {1: 5, 2: 26, 3: 60}[strength]


@pytest.mark.parametrize("n", [3])
def test_a_function_of_a_parameter_may_stand_for_it(n: int, request: pytest.FixtureRequest) -> None:
    assert cell_of(request.node, {"n": lambda n: n % 2}) == {"n": (int, 1)}


def test_cells_that_are_not_a_full_product_are_covered_too() -> None:
    cells = [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 0, "b": 2}]
    assert chosen(cells, 1) == [0, 1, 2] and chosen(cells, 2) == [0, 1, 2, 3]


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


@pytest.mark.sentinels("2-a")
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize("number", [1, 2])
def test_cells_that_are_no_sentinels_are_slow(number: int, letter: str, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number == 2 and letter == "a")


def test_a_sentinel_that_is_no_cell_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(covering, "UNKNOWN_SENTINELS", told)
    mark = pytest.mark.sentinels("c").mark
    cells = [
        SimpleNamespace(
            nodeid=f"t.py::test[{id}]",
            callspec=SimpleNamespace(id=id, params={}),
            get_closest_marker={"sentinels": mark}.get,
            add_marker=lambda marker: None,
        )
        for id in "ab"
    ]
    mark_uncovered(cells)
    assert told == ["t.py::test has no cells ['c']; it has ['a', 'b']"]


@pytest.mark.parametrize("value", [3, 4])
def test_a_fixture_may_ask_which_values_are_tested(value: int, request: pytest.FixtureRequest) -> None:
    assert value in selected(request, "value") and set(selected(request, "value")) <= {3, 4}


@pytest.mark.parametrize(
    ("marks", "everyday", "factor", "allowed"),
    [
        ({}, True, 1.0, False),
        ({}, True, 1.1, True),
        ({}, True, math.inf, True),  # `make test`: nobody measured the machine
        ({}, False, 1.0, True),  # the first test of a file pays for what all of its slow ones share
        ({"slow": pytest.mark.slow}, True, 1.0, True),
        ({"costs": pytest.mark.costs(20).mark}, True, 1.0, True),
    ],
    ids=["unmarked", "on a slow machine", "in make test", "in test-all", "slow", "costs"],
)
def test_a_test_that_is_too_dear_fails_in_test_budget_alone(
    marks: dict[str, object], everyday: bool, factor: float, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds in fixtures, one in the test, five to clean up."""
    spent = iter((100.0, 110.0, 111.0, 116.0))
    config = SimpleNamespace(stash=pytest.Stash())
    item = SimpleNamespace(nodeid="t.py::test", stash=pytest.Stash(), config=config, get_closest_marker=marks.get)
    refusal = pytest.raises(pytest.fail.Exception, match=r"t.py::test took 16\.0 s of processor time, fixtures")
    with monkeypatch.context() as patch:  # the session measures this test, too
        patch.setattr(covering, "processor_time", lambda: next(spent))
        patch.setattr(covering, "EVERYDAY", [everyday])
        patch.setattr(covering, "BUDGET_FACTOR", [factor])
        for phase in ("setup", "call", "teardown"):
            start(item, phase)
        with contextlib.nullcontext() if allowed else refusal:
            finish(item)
    times = config.stash[CPU_TIMES]["t.py::test"]
    assert times.pop("clock") >= 0 and times == {"setup": 10, "call": 1, "teardown": 5}


def test_the_dearest_files_are_named() -> None:
    times = {f"{file}.py::test[{i}]": {"setup": 0.5, "call": i, "clock": 9.0} for file in "ab" for i in range(3)}
    seconds = seconds_of_files(times | {"c.py::test": {"setup": 0.0, "call": 5.0, "teardown": 0.25}})
    assert seconds == {"a.py": 4.5, "b.py": 4.5, "c.py": 5.25}
    assert dearest_files(seconds, 2) == [
        "14 s of processor time in 3 files, the most in:",
        "    5.2 s  c.py",
        "    4.5 s  a.py",
    ]


def test_only_make_test_budget_has_a_budget() -> None:
    """What `make test` and `make test-all` call allows a test any time."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = {rule.split(":", 1)[0]: rule for rule in makefile.split("\n\n") if rule.startswith("test")}
    assert {name for name, rule in recipes.items() if "--budget" in shlex.split(rule)} == {"test-budget"}
