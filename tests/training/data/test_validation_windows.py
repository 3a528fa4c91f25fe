"""The validation loss is of the same windows, whatever ranks share them."""

from pathlib import Path

import pytest
import torch

from te_models.training.ranks.data_parallel import Ranks
from te_models.training.run_data import open_data, validation_batches, validation_windows
from tests.training.runs import tiny_run


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_windows_of_one(ranks: int, tmp_path: Path) -> None:
    """As many on all ranks together as on one, and each counts once, also where ranks do not divide them."""
    config = tiny_run(tmp_path)
    config = config.replace(data=config.data.replace(validation_fraction=0.2))
    data = open_data(config, vocab_size=config.model.config.vocab_size, may_build=True)
    (parts,) = validation_windows(config, data).values()

    def rows(count: int, world: int) -> torch.Tensor:
        run = config.replace(evaluation=config.evaluation.replace(batches=count))
        found = [validation_batches(run, parts, Ranks(r, world)) for r in range(world)]
        assert len({len(its.batches) for its in found}) == 1
        own = torch.cat([b.input_ids for its in found for b in its.batches[: its.counted]])
        assert len(own.unique(dim=0)) == len(own)
        return own.unique(dim=0)

    for count in (1, 3, 4):
        assert torch.equal(rows(count, ranks), rows(count, 1))
        assert len(rows(count, 1)) == count * config.data.micro_batch_size
