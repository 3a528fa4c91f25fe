"""Each rank is told each event once, rows go to rank 0 alone, and what a callback raises ends all ranks."""

from pathlib import Path

import pytest
import torch.distributed as dist

from te_models.training import CallbackError, EvaluationConfig, TrainConfig, latest_checkpoint, train
from tests.ranks import everyones, on_ranks
from tests.training.callbacks.test_callbacks import Notes
from tests.training.runs import tiny_run


def run_of(tmp_path: Path, name: str = "run", **parallel: int) -> TrainConfig:
    config = tiny_run(tmp_path, name, steps=4, evaluation=EvaluationConfig(every=2, batches=1))
    return config.replace(parallel=config.parallel.replace(**parallel))


LAYOUTS: dict[str, dict[str, int]] = {
    "copies": {},
    "shards": {"data_parallel_shard_size": 2},
    "split layers": {"tensor_model_parallel_size": 2},
    "stages": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.sentinels("copies", "stages")
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_each_event_once_on_every_rank_and_rows_on_the_first(layout: str, tmp_path: Path) -> None:
    rank = dist.get_rank()
    notes = [Notes(rank=rank, ranks=2) for _ in range(2)]
    train(run_of(tmp_path, **LAYOUTS[layout]), callbacks=notes)
    assert notes[0].told == notes[1].told
    first, second = everyones(notes[0].told)
    of_step = [
        ["on_step", *["on_evaluate"] * (s % 2 == 0), "on_log", *["on_save"] * (s % 2 == 0)] for s in (1, 2, 3, 4)
    ]
    expected = [(event, step) for step, events in enumerate(of_step, 1) for event in events]
    assert [(event, step) for event, step, _ in first] == [("on_begin", 0), *expected, ("on_end", 4)]
    assert second == [told for told in first if told[0] != "on_log"], "the same numbers in the same order"


@pytest.mark.parametrize(("event", "failing"), [("on_step", 1), ("on_log", 0), ("on_end", 1)])
@on_ranks(2)
def test_an_error_on_one_rank_ends_all_with_a_sentence(event: str, failing: int, tmp_path: Path) -> None:
    """The step is saved, each rank says why it ends, and the run goes on from there."""
    rank, config = dist.get_rank(), run_of(tmp_path)
    with pytest.raises(CallbackError) as caught:
        train(config, callbacks=[Notes(event if rank == failing else "", rank=rank, ranks=2)])
    step = 4 if event == "on_end" else 3
    said = f"the callback {Notes.__module__}:Notes failed in {event} at step {step}: RuntimeError: no more; "
    said = said if rank == failing else "a callback failed on another rank; "
    saved = "the run is complete: " if event == "on_end" else f"step {step} of 4 is saved in "
    assert str(caught.value).startswith(said + saved) and "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError) == (rank == failing)
    assert latest_checkpoint(tmp_path / "run").name == f"step-{step:08d}"
    dist.barrier()
    notes = Notes(rank=rank, ranks=2)
    train(config, callbacks=[notes])
    steps = [step for event, step, _ in notes.told if event == "on_step"]
    assert steps == list(range(step + 1, 5)) and notes.told[-1][0] == "on_end"
