"""The validation loss is of the same windows, whatever ranks share them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_models.training.ranks.data_parallel import Ranks
from te_models.training.run_data import open_data, validation_batches, validation_windows
from tests.training.runs import tiny_run


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_windows_of_one(ranks: int, tmp_path: Path) -> None:
    """As many on all ranks together, by `evaluation.batches` of each."""
    config = tiny_run(tmp_path)
    config = config.replace(data=config.data.replace(validation_fraction=0.2))
    data = open_data(config, vocab_size=config.model.config.vocab_size, may_build=True)
    (parts,) = validation_windows(config, data).values()

    def rows(count: int, world: int) -> torch.Tensor:
        run = config.replace(evaluation=config.evaluation.replace(batches=count))
        found = [b.input_ids for r in range(world) for b in validation_batches(run, parts, Ranks(r, world))]
        return torch.cat(found).unique(dim=0)

    assert torch.equal(rows(4 // ranks, ranks), rows(4, 1)) and len(rows(4, 1)) == 4 * config.data.micro_batch_size
