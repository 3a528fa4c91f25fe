"""`@on_ranks`: a test's body runs on ranks, and one that fails, dies or hangs there fails here, in words."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks as workers
from tests.ranks import on_ranks

CALLS: list[int] = []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that waits for one that failed is killed after a second."""
    monkeypatch.setattr(workers, "AFTER_A_FAILURE", 1)


def total(value: int) -> int:
    """The sum of a number over the ranks."""
    number = torch.tensor(value)
    dist.all_reduce(number)
    return int(number)


@on_ranks(2)
def fails(rank: int) -> None:
    assert dist.get_rank() != rank, f"{rank} is the one"
    total(1)


@on_ranks(2)
def dies() -> None:
    if dist.get_rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    total(1)


@on_ranks(2, timeout=2)
def hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(3600)


@on_ranks(2)
def skips() -> None:
    pytest.skip("for a reason")


@on_ranks(2)
@pytest.mark.parametrize("value", [1, 2])
def test_a_body_has_the_parameters_and_fixtures_of_its_test(value: int, tmp_path: Path) -> None:
    assert total(value) == 2 * value
    (tmp_path / str(dist.get_rank())).write_text("here")
    total(0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


@on_ranks(3)
def test_the_number_of_ranks_is_the_one_that_a_test_names() -> None:
    assert total(1) == 3


@on_ranks(2)
def counts(calls: int) -> None:
    CALLS.append(calls)
    assert len(CALLS) == calls, "the second call runs where the first one ran"
    assert torch.initial_seed() == 0
    torch.manual_seed(1)


@pytest.mark.usefixtures("impatient")
def test_the_workers_of_a_file_are_shared_and_start_each_test_alike() -> None:
    with contextlib.suppress(pytest.fail.Exception):
        fails(rank=0)  # the next ones are new
    counts(calls=1)
    counts(calls=2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_fails_the_test_with_its_traceback(rank: int) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        fails(rank=rank)
    text = str(failed.value)
    assert f"rank {rank} of 2: Traceback" in text and "test_ranks.py" in text and f"AssertionError: {rank} is" in text


def test_a_rank_that_dies_fails_the_test_with_what_it_wrote() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2: the process ended with -9:\nlast words"):
        dies()


def test_a_rank_that_hangs_fails_the_test_with_its_stack() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2: has not ended:[\s\S]*in hangs"):
        hangs()


def test_what_every_rank_skips_is_skipped_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="for a reason"):
        skips()


@on_ranks(2)
def test_workers_start_again_after_a_failure() -> None:
    assert total(1) == 2
