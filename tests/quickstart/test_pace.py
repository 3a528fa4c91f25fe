"""A slow machine trains on fewer batches, and the run says how many and why."""

import time
from dataclasses import replace

import pytest

from te_models.quickstart.pace import gemm_gflops, pace_line, paced
from te_models.quickstart.run import REAL, TINY, QuickstartSizes


@pytest.mark.parametrize("sizes", [REAL, TINY])
def test_batches_follow_the_speed(sizes: QuickstartSizes) -> None:
    """All from the full speed on; fewer below, in multiples of four, never too few to compare."""
    counts = [paced(sizes, gflops) for gflops in (0.1, 50.0, 150.0, 250.0, sizes.full_gflops, 1e5)]
    assert counts[0].train_batches == sizes.fewest_batches and counts[-1] == counts[-2] == sizes
    assert [c.train_batches for c in counts] == sorted(c.train_batches for c in counts)
    assert [c.compile for c in counts] == [False] * 4 + [True] * 2
    for chosen in counts:
        assert chosen.train_batches % 4 == 0 and 4 <= chosen.compared <= chosen.train_batches // 3
        assert replace(chosen, train_batches=sizes.train_batches, compared=sizes.compared, compile=True) == sizes


def test_what_is_chosen_is_said_with_its_reason() -> None:
    slow = pace_line(REAL, paced(REAL, 100.0), 100.0)
    assert "100 GFLOP/s" in slow and "training on 12 of 32 batches, without the compiler" in slow
    assert slow.endswith("(from 500 GFLOP/s on: all, compiled)")
    assert pace_line(REAL, REAL, 900.0).endswith("training on all 32 batches, compiled")


def test_the_measurement_is_short_and_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 * 256 * 576 * 1536 operations in the best time that was found, on a clock of the test."""
    times = iter([0.0, 0.0, 0.002, 0.01, 0.01, 0.011, 0.2])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    assert gemm_gflops(0.1) == pytest.approx(2 * 256 * 576 * 1536 / 0.001 / 1e9)
