"""Which cells of a test matrix run in `make test`, and how long an everyday test may take.

`@pytest.mark.matrix` on a parametrized test: `make test` runs a covering array of its cells, in which every value of
every parameter occurs ("each", the default) or every pair of values ("pairs"); `by={"case": family_of}` covers what a
function makes of a parameter's values, here every family. The other cells are marked slow and run in `make test-all`.
The choice depends on nothing but the parameters, so it is the same in every run.

`@pytest.mark.sentinels("qwen3-mxfp8", ...)` names the cells that `make test` runs, by their ids, where a person chooses
better: the cheapest of each mechanism."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from time import monotonic  # tests replace time's own
from typing import Any

import pytest

from tests.fork_server import processor_time

BUDGET_S = 15.0
"""Processor time, fixtures and processes included, that a test without the marker slow may take in `make test-budget`,
unless the marker `costs` gives it another number of seconds: a third of it on a quiet machine. The start of the fork
server and a cold cache of the compiler are allowed for."""

Cell = dict[str, Hashable]

CPU_TIMES = pytest.StashKey[dict[str, dict[str, float]]]()
"""In the stash of the configuration: processor seconds of each phase of each test, and its seconds by the clock."""
BUDGET_FACTOR = [math.inf]
"""How many times as long as on the machine that the budgets were written on a test may take; infinite, but where
`make test-budget` has measured this machine: no test fails for being slow elsewhere."""
EVERYDAY = [False]
"""Whether the session leaves out the slow tests: set before any test is imported."""
UNKNOWN_SENTINELS: list[str] = []
"""What is wrong with the names of sentinels, a sentence a test: one fails, not the session."""
FILES = pytest.StashKey[Counter[str]]()
"""In the stash of the configuration: processor seconds of each file, of all workers."""
_CLOCK = pytest.StashKey[dict[str, float]]()
_BEGAN = pytest.StashKey[float]()


def chosen(cells: list[Cell], strength: int) -> list[int]:
    """Return the positions of cells that cover all `strength`-tuples of parameter values which occur in any cell.

    Greedy: again and again the first of the cells that cover the most that is not covered yet."""
    tuples = [set(itertools.combinations(sorted(cell.items()), min(strength, len(cell)))) for cell in cells]
    missing = set().union(*tuples)
    found: list[int] = []
    while missing:
        best = max(range(len(cells)), key=lambda i: (len(tuples[i] & missing), -i))
        found.append(best)
        missing -= tuples[best]
    return sorted(found)


def cell_of(item: pytest.Item, by: Mapping[str, Callable[[Any], object]] | None = None) -> Cell:
    """Return the parameters of a test: equal values are one value, and one that cannot be hashed is equal to itself
    alone. (pytest's own indices number the cells, not the values.) by: functions of parameters that stand for them."""
    same = (by or {}).get
    return {name: _key(same(name, lambda x: x)(value)) for name, value in item.callspec.params.items()}


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value  # True is not 1


def mark_uncovered(items: list[pytest.Item]) -> None:
    """Mark as slow the cells of every matrix that its covering array leaves out. Cells that need an accelerator are a
    matrix of their own: where there is none, they cover nothing."""
    matrices: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") and not item.get_closest_marker("slow"):
            gpu = item.get_closest_marker("gpu") is not None
            matrices[item.nodeid.partition("[")[0], gpu].append(item)
    _mark_all_but_sentinels(items)
    for cells in matrices.values():
        marker = cells[0].get_closest_marker("matrix")
        strength = {(): 1, ("each",): 1, ("pairs",): 2}[marker.args]
        keep = set(chosen([cell_of(item, **marker.kwargs) for item in cells], strength))
        for i, item in enumerate(cells):
            if i not in keep:
                item.add_marker(pytest.mark.slow)


def _mark_all_but_sentinels(items: list[pytest.Item]) -> None:
    named: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sentinels"):
            named[item.nodeid.partition("[")[0]].append(item)
    for test, cells in named.items():
        keep = cells[0].get_closest_marker("sentinels").args
        ids = [_own_id(item) for item in cells]
        if len(cells) > len(keep) and (unknown := set(keep).difference(ids)):  # fewer were asked for by name
            UNKNOWN_SENTINELS.append(f"{test} has no cells {sorted(unknown)}; it has {sorted(set(ids))}")
        for its, item in zip(ids, cells, strict=True):
            if its not in keep:
                item.add_marker(pytest.mark.slow)


def _own_id(item: pytest.Item) -> str:
    """Return the id of a cell without the setting of the fixture `each_backend`: a sentinel runs under both."""
    backend = item.callspec.params.get("each_backend")
    return item.callspec.id if backend is None else item.callspec.id.removeprefix(f"{backend}-")


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of a parameter of the tests of this file that this session runs, each once: a fixture that
    runs all cases together runs these."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path and _has(item, name)]
    return list({str(values[name]): values[name] for values in params}.values())


def _has(item: pytest.Item, name: str) -> bool:
    return hasattr(item, "callspec") and name in item.callspec.params


def examples(count: int) -> int:
    """Return how many examples a property test sees: `count`, and a fifth of them, 20 at least, in `make test`."""
    return max(20, count // 5) if EVERYDAY[0] else count


def start(item: pytest.Item, phase: str) -> None:
    """Note that a phase of a test begins, and with it the one before ends."""
    item.stash.setdefault(_CLOCK, {})[phase] = processor_time()
    item.stash.setdefault(_BEGAN, monotonic())


def finish(item: pytest.Item) -> None:
    """Note that a test ends; in `make test-budget`, fail it where it took more than its budget and is not slow."""
    starts = item.stash[_CLOCK]
    ends = [*list(starts.values())[1:], processor_time()]
    times = {phase: round(end - begin, 3) for (phase, begin), end in zip(starts.items(), ends, strict=True)}
    clock = round(monotonic() - item.stash[_BEGAN], 3)
    item.config.stash.setdefault(CPU_TIMES, {})[item.nodeid] = times | {"clock": clock}
    spent, costs = sum(times.values()), item.get_closest_marker("costs")
    budget = BUDGET_FACTOR[0] * (BUDGET_S if costs is None else costs.args[0])
    # elsewhere the first test of a file pays for what all of its slow ones share
    if EVERYDAY[0] and spent > budget and not any(item.get_closest_marker(name) for name in ("slow", "real", "gpu")):
        pytest.fail(
            f"{item.nodeid} took {spent:.1f} s of processor time, fixtures and processes included ({times}); allowed: "
            f"{budget:.0f} s, or the marker slow beside a cheaper test of the same mechanism"
        )


def seconds_of_files(times: Mapping[str, Mapping[str, float]]) -> Counter[str]:
    """Return the processor seconds of each file. times: of each test, as in the stash."""
    found: Counter[str] = Counter()
    for test, phases in times.items():
        found[test.partition("::")[0]] += sum(seconds for phase, seconds in phases.items() if phase != "clock")
    return found


def dearest_files(seconds: Counter[str], count: int = 10) -> list[str]:
    """Return what the tests took in words, a line each: all together, and the files that took the most."""
    lines = [f"{seconds.total():.0f} s of processor time in {len(seconds)} files, the most in:"]
    return lines + [f"{taken:7.1f} s  {file}" for file, taken in seconds.most_common(count)]
