"""Batches read ahead are those of a run that reads none, also resumed; an error is the step's that needs the batch."""

import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from te_models.config import ConfigError
from te_models.training import DataError, load_config
from te_models.training.data.blend import Blend
from te_models.training.data.prefetch import Prefetcher
from te_models.training.data.windows import DocumentPacking, Windows
from te_models.training.data.writer import write_dataset
from tests.compare import refused


def readers(folder: Path) -> list[Blend]:
    """Consecutive windows, rows of documents, and a mixture."""
    generator = torch.Generator().manual_seed(0)
    sets = []
    for name in "ab":
        lengths = torch.randint(1, 30, (40,), generator=generator).tolist()
        documents = [[torch.randint(257, (n,), generator=generator).tolist()] for n in lengths]
        sets.append(write_dataset(folder / name, documents, 257))
    plain, other = (Windows(d, 16, "train", 0.1, 3) for d in sets)
    rows = Windows(sets[0], 32, "train", 0.1, 3, DocumentPacking(whole=True))
    one, most, rest = Fraction(1), Fraction(7, 10), Fraction(3, 10)
    return [Blend((plain,), (one,)), Blend((rows,), (one,)), Blend((plain, other), (most, rest))]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_reader_gives_other_batches(depth: int, tmp_path: Path) -> None:
    """From the first position, and from one in the middle, as after a resume."""
    for reader in readers(tmp_path):
        for begin in (0, 12):
            with Prefetcher(lambda p: reader.examples(p, 2), after=lambda p: p + 4, end=40, depth=depth) as ahead:  # noqa: B023
                for position in range(begin, 40, 4):
                    for found, expected in zip(ahead.at(position), reader.examples(position, 2), strict=True):
                        assert (found is None) == (expected is None)
                        assert found is None or torch.equal(found, expected)


def test_it_reads_while_a_step_runs_and_not_beyond_the_end() -> None:
    read: list[int] = []
    with Prefetcher(lambda p: read.append(p) or p, after=lambda p: p + 2, end=8, depth=2) as ahead:
        assert ahead.at(0) == 0
        deadline = time.monotonic() + 30
        while len(read) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert read == [0, 2, 4], "two steps ahead"
        assert [ahead.at(p) for p in (2, 4, 6)] == [2, 4, 6]
        assert ahead.at(4) == 4, "a position that was not expected"
    assert sorted(read) == [0, 2, 4, 4, 6] or sorted(read) == [0, 2, 4, 4, 6, 6]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("te_models-prefetch")]


def test_an_error_is_raised_by_the_step_that_needs_the_batch() -> None:
    def read(position: int) -> int:
        if position == 2:
            raise DataError("tokens.bin shrank")
        return position

    with Prefetcher(read, after=lambda p: p + 1, end=5, depth=3) as ahead:
        assert [ahead.at(0), ahead.at(1)] == [0, 1]
        refused(lambda: ahead.at(2), "shrank", error=DataError)


def test_without_depth_there_is_no_thread(tmp_path: Path) -> None:
    with Prefetcher(lambda p: threading.current_thread(), after=lambda p: p + 1, end=5, depth=0) as ahead:
        assert ahead.at(0) is threading.main_thread()
    file = tmp_path / "run.toml"
    file.write_text('output_dir = "r"\nsteps = 1\n[model]\npath = "m"\n[data]\npath = "d"\nprefetch = -1\n')
    refused(lambda: load_config(file), "[data] prefetch is -1; allowed: zero or a positive integer", error=ConfigError)
