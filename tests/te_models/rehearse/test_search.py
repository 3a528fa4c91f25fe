"""The search against all assignments of small tables, and what is predicted against what is put in."""

import itertools
import random

import pytest

from te_models.rehearse.effect import Interval, student
from te_models.rehearse.observe import Unit
from te_models.rehearse.predict import (
    MeasuredRun,
    Parts,
    Prediction,
    cheapest_assignment,
    equal_cost,
    interpolated,
    known_losses,
)
from te_models.rehearse.search import MOST, best_within, cheapest, front


def tables(seed: int, units: int) -> list[dict[str, tuple[float, float]]]:
    draw = random.Random(seed)
    return [
        {name: (cost * draw.randint(1, 4), gap * draw.random()) for name, cost, gap in FORMATS} for _ in range(units)
    ]


FORMATS = (("bf16", 1.0, 0.0), ("mxfp8", 0.5, 0.2), ("nvfp4", 0.25, 1.0))


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_that_of_all_assignments(seed: int) -> None:
    choices = tables(seed, 6)
    every = []
    for names in itertools.product(*choices):
        pairs = [options[name] for options, name in zip(choices, names, strict=True)]
        every.append((sum(cost for cost, _ in pairs), sum(gap for _, gap in pairs)))
    found = front(choices)
    for point in found:
        costs = [c[n] for c, n in zip(choices, point.formats, strict=True)]
        assert (point.cost, point.gap) == pytest.approx((sum(c for c, _ in costs), sum(g for _, g in costs)))
        assert not any(c < point.cost - 1e-9 and g < point.gap - 1e-9 for c, g in every)
    for budget in (0.0, 0.1, 0.5, 1.0, 3.0):
        best = min(c for c, g in every if g <= budget + 1e-12)
        point = cheapest(found, budget + 1e-12)
        assert point.cost == pytest.approx(best)
    for cost in (4.0, 8.0, 16.0):
        fitting = [g for c, g in every if c <= cost + 1e-9]
        point = best_within(found, cost)
        assert (point is None) == (not fitting)
        assert point is None or point.gap == pytest.approx(min(fitting))


def test_a_large_front_is_thinned_and_stays_near_the_best() -> None:
    draw = random.Random(0)
    choices = [{n: (c * draw.random(), g * draw.random()) for n, c, g in FORMATS} for _ in range(60)]
    found = front(choices)
    assert 100 < len(found) <= MOST
    middle = found[len(found) // 2]
    # the Lagrangian bound: no assignment of this cost can have a smaller gap than the dual says
    bound = max(
        sum(min(g + rate * c for c, g in options.values()) for options in choices) - rate * middle.cost
        for rate in (0.01 * 1.1**i for i in range(120))
    )
    assert bound <= middle.gap <= bound * 1.05 + 0.01
    with pytest.raises(ValueError, match="unit 1 has no format"):
        front([{"a": (1.0, 0.0)}, {}])


def units(groups: int) -> list[Unit]:
    return [
        Unit(f"decoder.layers.{i}.{kind}", f"decoder.layers.{i}", kind, 10.0) for i in range(groups) for kind in "ab"
    ]


def test_parts_add_up_to_what_was_measured() -> None:
    """With a format on all layers the prediction is what was measured: the KL, or the runs where they lose more."""
    them = units(3)
    errors = {u.name: {"fisher": 3.0 if u.kind == "a" else 1.0, "dw.noise": 1.0 + i} for i, u in enumerate(them)}
    layers = {"decoder.layers.0": (0.01, 0.0), "decoder.layers.2": (0.03, 0.0)}
    part = known_losses(them, layers, (0.09, 0.009), errors, Interval(1.0, 1.5), loss=4.0)
    assert part.forward == pytest.approx([0.1875, 0.0625, 0.375, 0.125, 0.5625, 0.1875])  # the middle: 0.02
    assert (part.together, part.error) == pytest.approx((1.5, 0.1)) and sum(part.backward) == 0
    assert part.gap([True] * 6) == pytest.approx(2.25)
    assert part.gap([True] + [False] * 5) == pytest.approx(0.1875 * (1 + 0.5 * 0.125))
    more = known_losses(them, layers, (0.09, 0.009), errors, Interval(3.0, 0.2), loss=4.0)
    assert more.gap([True] * 6) == pytest.approx(3.0) and more.backward[5] == pytest.approx(0.75 * 6 / 21)
    less = known_losses(them, layers, (0.09, 0.009), errors, Interval(1.0, 0.2), loss=4.0)
    assert less.gap([True] * 6) == pytest.approx(1.0)
    assert interpolated([None, 1.0, None, 3.0, None]) == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_the_choice_is_that_of_all_assignments() -> None:
    them = units(3)
    draw = random.Random(1)
    parts = {
        name: Parts(tuple(size * draw.random() for _ in them), (0.0,) * 6, together, 0.1)
        for name, size, together in (("mxfp8", 0.1, 1.0), ("nvfp4", 0.5, 1.0))
    }
    runs = tuple(
        MeasuredRun((name,) * 6, (gap - 0.1, gap, gap + 0.1)) for name, gap in (("mxfp8", 0.2), ("nvfp4", 1.2))
    )
    prediction = Prediction(them, parts, seeds=3, runs=runs)
    every = list(itertools.product(("bf16", "mxfp8", "nvfp4"), repeat=6))
    for budget in (0.05, 0.3, 0.8):
        best = min(prediction.cost(f) for f in every if prediction.gap(f) <= budget)
        point = cheapest_assignment(prediction, ["mxfp8", "nvfp4"], budget)
        assert prediction.cost(point.formats) == pytest.approx(best) and point.gap <= budget
    point = equal_cost(prediction, ["mxfp8", "nvfp4"], 0.5)
    assert point.gap == pytest.approx(min(prediction.gap(f) for f in every if prediction.cost(f) <= 0.5 + 1e-9))
    interval = prediction.interval(("mxfp8",) * 6)
    assert interval.high - interval.mean == pytest.approx(
        4.303 * (0.1**2 * 2 / 3 + (0.1 * interval.mean) ** 2) ** 0.5, rel=1e-3
    )


def test_each_format_is_corrected_by_its_own_runs() -> None:
    """MXFP8 loses twice what it was predicted to: that says nothing of NVFP4, whose interval stays as wide."""
    parts = {name: Parts((gap / 6,) * 6, (0.0,) * 6, 1.0, 0.0) for name, gap in (("mxfp8", 1.2), ("nvfp4", 12.0))}
    runs = (MeasuredRun(("mxfp8",) * 6, (1.1, 1.2, 1.3)), MeasuredRun(("nvfp4",) * 6, (11.0, 12.0, 13.0)))
    before = Prediction(units(3), parts, seeds=3, runs=runs)
    one, other = (("bf16",) * 3 + (name,) * 3 for name in ("mxfp8", "nvfp4"))
    after = before.knowing(MeasuredRun(one, (1.1, 1.2, 1.3)))
    for _ in range(8):
        after = after.knowing(MeasuredRun(one, (1.1, 1.2, 1.3)))
    assert before.gap(one) == pytest.approx(0.6) and after.gap(one) == pytest.approx(1.2, rel=0.05)
    assert after.interval(one).half_width < 0.5 * before.interval(one).half_width
    assert after.interval(other) == before.interval(other) and after.gap(other) == pytest.approx(6.0)
    # what runs have measured is not corrected; without a run of a part, an error of the correction widens the interval
    assert after.gap(("mxfp8",) * 6) == pytest.approx(1.2)
    assert before.interval(other).half_width == pytest.approx(
        ((4.303**2 * 2 / 3) + (1.96 * 0.25 * 3.0) ** 2) ** 0.5, rel=1e-3
    )


def test_what_was_run_takes_part_in_the_search() -> None:
    """MXFP8 loses twice its parts on a few units, and on all what was measured: a sum over units does not say that."""
    parts = {name: Parts((gap / 6,) * 6, (0.0,) * 6, 1.0, 0.0) for name, gap in (("mxfp8", 1.2), ("nvfp4", 3.0))}
    runs = (MeasuredRun(("mxfp8",) * 6, (1.1, 1.2, 1.3)), MeasuredRun(("nvfp4",) * 6, (2.9, 3.0, 3.1)))
    half = MeasuredRun(("bf16",) * 3 + ("mxfp8",) * 3, (1.1, 1.2, 1.3))
    prediction = Prediction(units(3), parts, seeds=3, runs=(*runs, *[half] * 9))
    point = equal_cost(prediction, ["mxfp8", "nvfp4"], 0.5)
    assert point.formats == ("mxfp8",) * 6 and point.gap == pytest.approx(1.2)
    assert equal_cost(prediction, ["nvfp4"], 0.5).gap == pytest.approx(2.0)  # of formats that nobody asked for, none


def test_intervals_over_seeds() -> None:
    found = Interval.of([1.0, 2.0, 3.0])
    assert (found.mean, found.half_width) == pytest.approx((2.0, 4.303 / 3**0.5))
    assert found.holds(4.4) and not found.holds(4.5)
    assert student(30) == pytest.approx(2.042, rel=0.005) and student(100) == pytest.approx(1.984, rel=0.005)
