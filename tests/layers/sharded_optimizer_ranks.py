"""What each of the two processes of test_sharded_optimizer does: `-m tests.layers.sharded_optimizer_ranks RESULTS`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from te_models.layers import FusedAdamW, Linear
from te_models.layers.tensor.fsdp import local_part
from tests.ranks import report_cases

MOMENTS = ("float32", "bfloat16", "float8")
ROWS = (256, 3, 1)
"""Of the weight: over two ranks equal shards, unequal ones, and one that is empty."""


def stepped(moments: str, rows: int, columns: int = 200) -> tuple[Linear, FusedAdamW]:
    """Return a layer and its optimizer after two steps."""
    torch.manual_seed(0)
    model = Linear(columns, rows, bias=False)
    x, slope = torch.randn(2, 16, columns), torch.randn(16, rows)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = FusedAdamW(model.parameters(), lr=0.01, moment_dtype=moments)
    for batch in x:
        (model(batch) * slope).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy this rank's bytes of an optimizer's state."""
    return {name: local_part(t).detach().clone().reshape(-1).view(torch.uint8) for name, t in state.items()}


def moments_come_back_on_every_rank(moments: str, rows: int, folder: Path) -> None:
    model, optimizer = stepped(moments, rows)
    state = optimizer.state[model.weight]
    before = bits(state)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    for tensor in state.values():
        local_part(tensor).reshape(-1).view(torch.uint8).zero_()
    found = get_optimizer_state_dict(model, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, found)
    after = bits(optimizer.state[model.weight])
    assert before.keys() == after.keys()
    for name, expected in before.items():
        assert torch.equal(after[name], expected), name
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()


def other_shards_are_refused(folder: Path) -> None:
    """Shards of 100 elements and a whole of 200 have two blocks of moments, which hold other elements."""
    model, optimizer = stepped("float8", 2, 100)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    whole = Linear(100, 2, bias=False)
    alone = FusedAdamW(whole.parameters(), lr=0.01, moment_dtype="float8")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(get_optimizer_state_dict(whole, alone), checkpoint_id=folder)
    with pytest.raises(ValueError, match="sharded over another number of ranks"):
        alone.load_state_dict(optimizer.state_dict())


def whole_blocks_serve_any_number_of_ranks(folder: Path) -> None:
    model, optimizer = stepped("float8", 4, 64)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    whole = Linear(64, 4, bias=False)
    alone = FusedAdamW(whole.parameters(), lr=0.01, moment_dtype="float8")
    found = get_optimizer_state_dict(whole, alone)
    dcp.load(found, checkpoint_id=folder)
    set_optimizer_state_dict(whole, alone, found)
    rank = torch.distributed.get_rank()
    for name, tensor in optimizer.state[model.weight].items():
        here = alone.state[whole.weight][name]
        mine = here.chunk(2)[rank] if here.dim() else here
        assert torch.equal(mine.float(), local_part(tensor).float()), name


def cases(folder: Path) -> dict[str, Callable[[], None]]:
    """Return the cases by name."""
    case = moments_come_back_on_every_rank
    found = {f"{m}-{rows}": functools.partial(case, m, rows, folder / f"{m}{rows}") for m in MOMENTS for rows in ROWS}
    found["other shards"] = functools.partial(other_shards_are_refused, folder / "other")
    found["whole blocks"] = functools.partial(whole_blocks_serve_any_number_of_ranks, folder / "whole")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    report_cases(cases(Path(sys.argv[1]).parent), sys.argv[1])
