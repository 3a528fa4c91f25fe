"""The metrics have the extremes of the ranks: who waits for data, who is slow, who takes the most memory."""

from pathlib import Path

import pytest

from tests.training.processes import train_on_ranks
from tests.training.runs import rows_of, tiny_run

UNEVEN = """
import os, time
now = [0.0]  # the clock moves by what is said to take time alone, whatever else the machine does
time.perf_counter = lambda: now[0]
def take(seconds): now[0] += seconds
from te_models.training.data.blend import Blend
from te_models.training import loop
rank, batch = int(os.environ["RANK"]), Blend.examples
Blend.examples = lambda *arguments: (take(0.2 * rank), batch(*arguments))[1]
trim = loop.return_freed_memory
loop.return_freed_memory = lambda: (take(0.9 * (1 - rank)), trim())[1]
kept = bytearray(300 << 20) if rank else None
"""


def test_the_extremes_of_two_ranks(tmp_path: Path) -> None:
    """Rank 1 reads slowly and takes 300 MiB more; rank 0 is slow elsewhere."""
    config = tiny_run(tmp_path, steps=2)
    config = config.replace(data=config.data.replace(prefetch=0))  # which would hide the wait
    train_on_ranks(config, tmp_path, before=UNEVEN, after="print(len(kept or ''))")
    for row in rows_of(config):
        assert row["data_s"] == row["step_s_min"] == pytest.approx(0.4), "two micro-batches"
        assert row["step_s_max"] == pytest.approx(0.9) and row["peak_memory"] > 500 << 20
